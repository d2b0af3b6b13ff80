"""The tensors of a checkpoint as its files have them: one description for all formats.

A format is a file beside this one. How a safetensors file has a quantised matrix is a row of
`modules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.coding import Codes, Coding

Shapes = Mapping[str, tuple[int, ...]]  # tensor name |-> its shape
Part = slice | tuple[slice, ...]  # of a tensor; (): all of it


class StoredTensor(Protocol):
    """A tensor that is read, and decoded, where a part of it is asked for.

    Tensors of torch are such: mapped ones, whose pages are read when they are used.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the model."""
        ...

    def __getitem__(self, part: Part, /) -> Tensor:
        """Some of its rows, and of these some columns. Other parts of the file are not read."""
        ...


@runtime_checkable
class CodedTensor(StoredTensor, Protocol):
    """One of a format whose codes can be packed as they are."""

    @property
    def coding(self) -> Coding | None:
        """How its weights are coded, if they are."""
        ...

    def coded(self, part: Part, /) -> Codes:
        """As `__getitem__`, before it is decoded: whole units of the columns."""
        ...


@runtime_checkable
class ScaledTensor(StoredTensor, Protocol):
    """One of a format that has scales apart from its codes."""

    def bad_row(self) -> int | None:
        """The first row with a scale that is not finite; None: there is none. Decodes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What files hold."""

    tensors: Mapping[str, StoredTensor]  # that the model has, by its names
    file_of: Mapping[str, Path]  # of these
    others: list[str]  # names, as files have them, of tensors that it does not account for
    called: Callable[[str], str] = str  # name in the model -> name in the files


class Reader(Protocol):
    """Finds tensors in the files of one format."""

    def __call__(self, checkpoint: Checkpoint, expected: Shapes) -> Found:
        """Raises ModelError: a file is damaged, or holds a type that is not read."""
        ...


def listed(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    every = sorted(names)
    more = len(every) - 3
    return ", ".join(every[:3]) + (f" and {more} more" if more > 0 else "")
