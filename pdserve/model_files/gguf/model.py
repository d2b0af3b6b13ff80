"""A model in one GGUF file, or in several: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pdserve.model_files.gguf.container import GgufFile, GgufTensor, read_gguf
from pdserve.shared.errors import ModelError

SPLIT_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)")
_MOST_PARTS: Final = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class GgufModel:
    """What all of its files say."""

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, GgufTensor]

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0].path

    @property
    def values(self) -> Mapping[str, Any]:
        """Those of the first file: others have tensors only."""
        return self.files[0].values

    @property
    def num_elements(self) -> int:
        """Weights of all tensors."""
        types = ((one.num_bytes // one.type.bytes, one.type) for one in self.tensors.values())
        return sum(blocks * kind.elements for blocks, kind in types)


def open_gguf(path: Path) -> GgufModel:
    """Open a model by any of its files.

    Raises:
        ModelError: a file is missing, damaged or of another model, or holds what is not read.
    """
    return _open(tuple((part, _stamp(part)) for part in part_paths(path)))


def forget_files() -> None:
    """Let go of files that were read, of whose vocabularies nothing else is needed.

    Texts and scores of 262,144 tokens are 40 MB. Who asks for a file again reads it again.
    """
    _open.cache_clear()


def part_paths(path: Path) -> list[Path]:
    """The files of the model of which this is one. Raises ModelError: one is missing."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MOST_PARTS:
        raise ModelError(f"{path}: files of a split model are numbered from 00001 to their number")
    names = [f"{match[1]}-{number:05}-of-{match[3]}{match[4]}" for number in range(1, count + 1)]
    paths = [path.parent / name for name in names]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise ModelError(
            f"{path} is one of {count} files of a model, and {missing[0]} is not beside it"
        )
    return paths


def split_pattern(name: str) -> str:
    """Return a pattern of the names of all files of the model of which this is one."""
    match = SPLIT_NAME.fullmatch(name)
    return name if match is None else f"{match[1]}-*-of-{match[3]}{match[4]}"


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=2)
def _open(parts: tuple[tuple[Path, tuple[int, int]], ...]) -> GgufModel:
    """Open files that have these sizes and times: a file is read once, though asked for often."""
    files = tuple(read_gguf(path) for path, _ in parts)
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        _check_part(file, number, len(files))
        if twice := tensors.keys() & file.tensors.keys():
            raise ModelError(f"{file.path} has the tensor {min(twice)}, which another part has too")
        tensors |= file.tensors
    expected = files[0].values.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(
            f"{files[0].path} is of {expected} tensors, but its files have {len(tensors)}"
        )
    return GgufModel(files, tensors)


def _check_part(file: GgufFile, number: int, count: int) -> None:
    said = file.values.get("split.no", 0), file.values.get("split.count", 0) or 1
    if said != (number, count):
        raise ModelError(
            f"{file.path} says that it is part {said[0]} of {said[1]}, counted from 0, but it is "
            f"named as part {number} of {count}"
        )
