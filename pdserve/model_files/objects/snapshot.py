"""A model of an object store on this machine: fetched once, verified, and bounded.

    CACHE/ADDRESS/blobs/KEY            content, by name, size and version
    CACHE/ADDRESS/snapshots/DIGEST/    a model: links to its content

A snapshot's name is the digest of its files' names and SHA-256: two machines with the same name
have the same bytes. What was used longest ago is removed when there is no room.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.model_files.objects.download import fetch
from pdserve.model_files.objects.listing import SUMS_FILE, Remote, RemoteFile, parse_sums
from pdserve.model_files.objects.opening import open_store
from pdserve.shared.errors import ConfigError, ModelError
from pdserve.shared.process.file_lock import file_lock
from pdserve.shared.process.may_pass import NotNow, config_error
from pdserve.shared.process.user_cache import cache_folder

log = logging.getLogger(__name__)

WAIT_S: Final = 6 * 3600.0  # for another process that fetches the same
KEPT_FREE: Final = 20  # one of so many bytes of the disk is left to others
_LINE_S: Final = 30.0  # between two lines about waiting


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model's files here."""

    path: Path
    digest: str  # of all that was asked for


def snapshot(url: str, patterns: Sequence[str], index: str, cache: Path | None = None) -> Snapshot:
    """Fetch the files of a model with names like these, unless they are here.

    If the store cannot be reached, what was fetched last is used.

    Args:
        url: of a folder in an object store.
        patterns: of names.
        index: the file that names others, for stores that list none.
        cache: by default the user's.

    Raises:
        ConfigError: there is no such model, or it cannot be read.
        NotNow: it cannot be had now, or there is no room for it.
        ModelError: its bytes are not those that its SHA256SUMS say.
    """
    folder = (cache or _cache(url)) / _slug(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock", WAIT_S, _tell_waiting(url)) as is_ours:
            if not is_ours:
                raise NotNow(f"{url}: another process has been fetching it for {WAIT_S:g} s")
            return _snapshot(Remote(url, open_store(url)), [*patterns, SUMS_FILE], index, folder)
    except OSError as error:
        raise config_error(f"{url} cannot be kept in {folder}: {error}", error) from error


def _snapshot(remote: Remote, patterns: Sequence[str], index: str, folder: Path) -> Snapshot:
    try:
        files = remote.files(patterns, index)
    except NotNow as error:
        if (former := _latest(folder, patterns)) is None:
            raise
        log.warning("%s; what was fetched last is used, %s", error, former.digest[:12])
        return former
    sums = _sums(remote, files)
    blobs = folder / "blobs"
    blobs.mkdir(exist_ok=True)
    _make_room(folder, [file for file in files if not (blobs / file.key).exists()])
    digests = {}
    for file in files:
        if file.name == SUMS_FILE:
            continue
        digests[file.name] = fetch(remote, file, blobs / file.key)
        expected = sums.get(file.name, digests[file.name])
        if digests[file.name] != expected:
            _remove_blob(blobs / file.key)
            raise ModelError(
                f"{remote.url}/{file.name} is damaged: its SHA-256 is {digests[file.name][:12]}, "
                f"and {SUMS_FILE} says {expected[:12]}"
            )
    digest = _digest(digests)
    made = folder / "snapshots" / digest
    _link(made, {file.name: blobs / file.key for file in files if file.name != SUMS_FILE})
    _note(folder, patterns, digest)
    return Snapshot(made, digest)


def _sums(remote: Remote, files: Sequence[RemoteFile]) -> dict[str, str]:
    """What the model's SHA256SUMS say; nothing if there are none."""
    listed = next((file for file in files if file.name == SUMS_FILE), None)
    return {} if listed is None else parse_sums(remote.read_small(listed), remote.url)


def _digest(digests: dict[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _link(made: Path, files: dict[str, Path]) -> None:
    """Make the folder of a snapshot, or renew it."""
    for name, blob in files.items():
        link = made / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    os.utime(made)


# ---- what was fetched last -----------------------------------------------------------------------


def _note(folder: Path, patterns: Sequence[str], digest: str) -> None:
    (folder / f"latest-{_kind(patterns)}").write_text(digest)


def _latest(folder: Path, patterns: Sequence[str]) -> Snapshot | None:
    try:
        digest = (folder / f"latest-{_kind(patterns)}").read_text()
    except FileNotFoundError:
        return None
    path = folder / "snapshots" / digest
    is_whole = path.is_dir() and all(link.exists() for link in path.rglob("*"))
    return Snapshot(path, digest) if is_whole else None


def _kind(patterns: Sequence[str]) -> str:
    """Snapshots with weights are not those without."""
    return hashlib.blake2b("\0".join(patterns).encode(), digest_size=8).hexdigest()


# ---- room ----------------------------------------------------------------------------------------


def _make_room(folder: Path, files: Sequence[RemoteFile]) -> None:
    """Remove what other models left, oldest first, until there is room for these files.

    Raises:
        NotNow: there is none.
    """
    wanted = sum(file.num_bytes for file in files) - _num_begun(folder, files)
    for former in _by_age(folder.parent, without=folder):
        if _room(folder) >= wanted:
            return
        _remove(former)
    if (room := _room(folder)) < wanted:
        raise NotNow(
            f"{wanted >> 20} MiB are to be fetched, and {folder} has room for {room >> 20}"
        )


def _remove(former: Path) -> None:
    """Remove what is in the folder of a model, unless somebody fetches it now."""
    with file_lock(former / "lock", 0.0, lambda: None) as is_ours:
        if is_ours:
            log.info("removing %s, to make room", former)
            for part in ("snapshots", "blobs"):
                shutil.rmtree(former / part, ignore_errors=True)


def _num_begun(folder: Path, files: Sequence[RemoteFile]) -> int:
    parts = (folder / "blobs" / f"{file.key}.part" for file in files)
    return sum(part.stat().st_size for part in parts if part.exists())


def _room(folder: Path) -> int:
    usage = shutil.disk_usage(folder)
    return max(0, usage.free - usage.total // KEPT_FREE)


def _by_age(cache: Path, without: Path) -> list[Path]:
    """Folders of other models."""
    found = []
    for folder in cache.iterdir():
        used = [path.stat().st_mtime for path in (folder / "snapshots").glob("*")]
        if folder != without and used:
            found.append((max(used), folder))
    return [folder for _, folder in sorted(found)]


def _remove_blob(blob: Path) -> None:
    for path in (blob, blob.with_name(f"{blob.name}.sha256")):
        path.unlink(missing_ok=True)


# ---- names ---------------------------------------------------------------------------------------


def _cache(url: str) -> Path:
    found = cache_folder("models")
    if found is None:
        raise ConfigError(f"{url}: there is no home directory to keep it in: set XDG_CACHE_HOME")
    return found


def _slug(url: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", url)[-80:].strip("-.")
    return f"{readable}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"


def _tell_waiting(url: str) -> Callable[[], None]:
    """Return what says now and then, while it is called, that another process fetches it."""
    next_s = 0.0

    def tell() -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            log.info("waiting for another process that fetches %s", url)
            next_s = time.monotonic() + _LINE_S

    return tell
