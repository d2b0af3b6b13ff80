"""Files of a repository that git-lfs keeps elsewhere: without it, a clone has only pointers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pdserve.shared.errors import ModelError

_BEGINNING: Final = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(file: Path) -> None:
    """Raise ModelError if the file is a pointer to its content; call it before saying "damaged"."""
    with file.open("rb") as stream:
        is_pointer = stream.read(len(_BEGINNING)) == _BEGINNING
    if is_pointer:
        raise ModelError(
            f"{file} is a pointer of git-lfs, not the file itself: run `git lfs pull` in its "
            "directory"
        )
