"""Opens the tensors of a checkpoint, whatever its format, as the model has them.

All are checked before any is read: a missing, misshapen or unknown tensor is an error, because the
model would run but give wrong answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pdserve.engine.plan.matrix import TensorRows
from pdserve.engine.weights.stored.matrix import ranges
from pdserve.engine.weights.stored.tensors import (
    CodedTensor,
    Part,
    Reader,
    ScaledTensor,
    Shapes,
    StoredTensor,
    listed,
)
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.coding import Codes, Coding
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError


@dataclass(frozen=True, slots=True)
class SomeRows:
    """A tensor of the model that is some rows of a stored one, in another order or transposed."""

    tensor: StoredTensor
    place: TensorRows
    shape: tuple[int, ...]

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        if self.place.is_transposed:
            rows, columns = ranges(part, self.shape)
            first = self.place.first_row
            cut = slice(first + columns.start, first + columns.stop), slice(rows.start, rows.stop)
            return self.tensor[cut].T
        stored, order = self._stored(part)
        return self.tensor[stored][order]

    @property
    def coding(self) -> Coding | None:
        """See `CodedTensor`."""
        return self.tensor.coding if isinstance(self.tensor, CodedTensor) else None

    def coded(self, part: Part) -> Codes:
        """See `CodedTensor`."""
        assert isinstance(self.tensor, CodedTensor), "it has a coding"
        stored, order = self._stored(part)
        return self.tensor.coded(stored).rows(np.array(order))

    def bad_row(self) -> int | None:
        """See `ScaledTensor`."""
        row = self.tensor.bad_row() if isinstance(self.tensor, ScaledTensor) else None
        if row is None or self.place.is_transposed:  # its columns are checked when decoded
            return None
        (rows, *_), order = self._stored(())
        return order.index(row - rows.start) if row - rows.start in order else None

    def _stored(self, part: Part) -> tuple[tuple[slice, ...], list[int]]:
        """Return the part of the stored tensor, whole heads, and which rows of it are meant."""
        rows, *columns = (part if isinstance(part, tuple) else (part,)) or (slice(None),)
        own, order = range(*rows.indices(self.shape[0])), self.place.head_order or (0,)
        size, there = self.place.strides
        first, end = own.start // size * there, -(-own.stop // size) * there
        start = self.place.first_row
        meant = [row // size * there + order[row % size] - first for row in own]
        return (slice(start + first, start + end), *columns), meant


def open_tensors(
    checkpoint: Checkpoint,
    expected: Shapes,
    *,
    ignored: tuple[str, ...] = (),
    within: Mapping[str, TensorRows] | None = None,
) -> dict[str, StoredTensor]:
    """Return name |-> tensor, in the order of the files.

    Args:
        checkpoint: whose files are read.
        expected: the tensors that the model has.
        ignored: how the names of those begin that files may have besides.
        within: where the files have those that are not tensors of their own there.

    Raises:
        MissingTensor: the files lack a tensor.
        MisshapedTensor: a tensor's shape contradicts the config.
        ModelError: a file is damaged, or holds tensors that the model does not have.
    """
    places = {name: TensorRows(name) for name in expected} | dict(within or {})
    stored = _stored_shapes(expected, places)
    found = _reader(checkpoint)(checkpoint, stored)
    for name, tensor in found.tensors.items():
        if tuple(tensor.shape) != stored[name]:
            raise MisshapedTensor(
                f"{found.file_of[name]}: {found.called(name)} has the shape "
                f"{list(tensor.shape)}, but the config makes it {list(stored[name])}"
            )
    if missing := stored.keys() - found.tensors.keys():
        raise MissingTensor(f"{checkpoint.path} lacks {listed(map(found.called, missing))}")
    if unknown := [name for name in found.others if not name.startswith(ignored)]:
        raise ModelError(
            f"{checkpoint.path} holds {listed(unknown)}, which the config does not account for"
        )
    in_files = {name: number for number, name in enumerate(found.tensors)}
    names = sorted(expected, key=lambda name: in_files[places[name].name])
    return {name: _part_of(found.tensors, places[name], expected[name]) for name in names}


def _stored_shapes(expected: Shapes, places: Mapping[str, TensorRows]) -> Shapes:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_rows, *columns) in expected.items():
        place = places[name]
        if place.is_transposed:
            num_rows, *columns = *columns, num_rows
        size, there = place.strides
        num_rows = num_rows // size * there
        before = shapes.get(place.name, (0,))[0]
        shapes[place.name] = (max(before, place.first_row + num_rows), *columns)
    return shapes


def _part_of(
    tensors: Mapping[str, StoredTensor], place: TensorRows, shape: tuple[int, ...]
) -> StoredTensor:
    tensor = tensors[place.name]
    if place == TensorRows(place.name) and tensor.shape == shape:
        return tensor
    if isinstance(tensor, Tensor) and not (place.head_order or place.is_transposed):  # is mapped
        return tensor[place.first_row : place.first_row + shape[0]]
    return SomeRows(tensor, place, shape)


def _reader(checkpoint: Checkpoint) -> Reader:
    from pdserve.engine.weights.stored.gguf import gguf_tensors
    from pdserve.engine.weights.stored.safetensors import safetensors

    return safetensors if checkpoint.gguf is None else gguf_tensors
