"""The tensors of a checkpoint as its files have them: one description for all formats.

A format is a file beside this one, with a function that finds the tensors that a model has, and a
row of `_READERS`. Whatever the format, all are checked before any is read: a missing, misshapen or
unknown tensor is an error, because the model would run but give wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError

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


def open_tensors(
    checkpoint: Checkpoint, expected: Shapes, *, ties_embeddings: bool
) -> dict[str, StoredTensor]:
    """Return name |-> tensor, in the order of the files.

    Args:
        checkpoint: whose files are read.
        expected: the tensors that the model has.
        ties_embeddings: ignore a copy of the embedding that is stored as the output head.

    Raises:
        MissingTensor: the files lack a tensor.
        MisshapedTensor: a tensor's shape contradicts the config.
        ModelError: a file is damaged, or holds tensors that the model does not have.
    """
    found = _reader(checkpoint)(checkpoint, expected)
    for name, tensor in found.tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise MisshapedTensor(
                f"{found.file_of[name]}: {found.called(name)} has the shape "
                f"{list(tensor.shape)}, but the config makes it {list(expected[name])}"
            )
    if missing := expected.keys() - found.tensors.keys():
        raise MissingTensor(f"{checkpoint.path} lacks {listed(map(found.called, missing))}")
    unknown = [name for name in found.others if not (ties_embeddings and name == "lm_head.weight")]
    if unknown:
        raise ModelError(
            f"{checkpoint.path} holds {listed(unknown)}, which the config does not account for"
        )
    return dict(found.tensors)


def listed(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    every = sorted(names)
    more = len(every) - 3
    return ", ".join(every[:3]) + (f" and {more} more" if more > 0 else "")


def _reader(checkpoint: Checkpoint) -> Reader:
    from pdserve.engine.weights.stored_gguf import gguf_tensors
    from pdserve.engine.weights.stored_safetensors import safetensors

    return safetensors if checkpoint.gguf is None else gguf_tensors
