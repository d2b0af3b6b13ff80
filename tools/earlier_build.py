"""Builds an earlier commit beside this tree, for tests of clusters that have both.

Usage: python -m tools.earlier_build [FLAGS OF PIP]

It is compiled once, and uses the packages of the environment that this runs in.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Final

from pdserve.shared.errors import ConfigError

# The oldest build that has to work together with this one. It is moved on with PROTOCOL, and when
# a change is meant to be the last that it understands: `docs/OPERATING.md` says what may change.
EARLIER: Final = "c1c0d0ef"
ROOT: Final = Path(__file__).resolve().parents[1]
_FOLDER: Final = ROOT / "build" / "earlier"


def python_of(commit: str = EARLIER) -> Path:
    """The interpreter that runs the build, which is there once it has been built."""
    return _FOLDER / commit / "venv" / "bin" / "python"


def build(commit: str = EARLIER, flags: list[str] | None = None) -> Path:
    """Build the commit unless it is built; return its interpreter.

    Raises:
        ConfigError: git lacks the commit.
        CalledProcessError: its kernels cannot be compiled.
    """
    python = python_of(commit)
    is_whole = python.parents[2] / "is_whole"
    if is_whole.exists():
        return python
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", commit], check=False).returncode:
        raise ConfigError(f"this clone lacks commit {commit}: git fetch --unshallow")
    source = python.parents[2] / "source"
    source.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        ["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE
    ) as archive:
        assert archive.stdout is not None
        with tarfile.open(fileobj=archive.stdout, mode="r|") as files:
            files.extractall(source, filter="data")
    venv.create(python.parents[1], with_pip=False, clear=True)
    paths = sysconfig.get_paths(vars={"base": str(python.parents[1])})
    # A path alone: an editable install of this tree, which hooks into imports, is not followed.
    (Path(paths["purelib"]) / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *(flags or []), source], check=True)
    is_whole.touch()
    return python


if __name__ == "__main__":
    try:
        print(build(flags=sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"earlier_build: {error}")
