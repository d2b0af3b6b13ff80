"""Where the tensors of a model are in a GGUF file, and in which order of rows. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pdserve.model_files.coding import Codes, Coding
from pdserve.model_files.gguf.architectures import ARCHITECTURES
from pdserve.model_files.gguf.config import architecture_of
from pdserve.model_files.gguf.container import GgufTensor
from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.model_files.gguf.names import OF_HEADS, ONE_ROW, Place, place_of

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class GgufPart:
    """A matrix or vector of the model, which may be some rows of a tensor."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0  # of a matrix, counted over all that the tensor has
    num_heads: int = 0  # whose rows are permuted: [2, half] is stored as [half, 2]; 0: none are

    @property
    def coding(self) -> Coding | None:
        """How its weights are coded, if it is a matrix that is."""
        coded = self.tensor.type.coded
        return None if coded is None or len(self.shape) == 1 else coded.coding

    def decoded(self, rows: range, columns: range) -> NDArray[np.float32]:
        """Some weights of a matrix; or, as one column, of a vector's rows."""
        kind = self.tensor.type
        if len(self.shape) == 1:  # is one row in the file
            own = self._stored_rows(rows)
            line = range(self.first_row, self.first_row + 1)
            blocks = kind.blocks(self.tensor.data, self.shape[0], line, own)
            return self._in_order(kind.decode_rows(blocks, own).T, rows)
        return kind.decode_rows(self._blocks(rows, columns), columns)

    def codes(self, rows: range, columns: range) -> Codes:
        """Some rows of a matrix that is coded, and of them whole units of the columns."""
        kind = self.tensor.type
        assert kind.coded is not None, "it has a coding"
        assert columns.start % kind.elements == columns.stop % kind.elements == 0, "whole units"
        blocks = np.ascontiguousarray(self._blocks(rows, columns))
        return kind.coded.read(blocks.reshape(-1, kind.bytes), len(rows))

    def bad_row(self) -> int | None:
        """The first row of a matrix with a scale that is not finite; None: there is none."""
        kind = self.tensor.type
        if not kind.has_scales or len(self.shape) == 1:
            return None
        rows, columns = map(range, self.shape)
        stored = kind.are_bad(self._stored_blocks(rows, columns))
        is_bad = self._in_order(stored, rows).any(axis=1)
        return int(is_bad.argmax()) if is_bad.any() else None

    def _blocks(self, rows: range, columns: range) -> NDArray[np.uint8]:
        """Blocks of rows as the model has them: [rows, blocks, bytes]."""
        return self._in_order(self._stored_blocks(rows, columns), rows)

    def _stored_blocks(self, rows: range, columns: range) -> NDArray[np.uint8]:
        """Those of `_stored_rows`, in the order of the file and not copied."""
        stored = self._stored_rows(rows)
        own = range(self.first_row + stored.start, self.first_row + stored.stop)
        return self.tensor.type.blocks(self.tensor.data, self.shape[1], own, columns)

    def _stored_rows(self, rows: range) -> range:
        """Those that these are among: of whole heads, if they are permuted."""
        if not self.num_heads:
            return rows
        size = self.shape[0] // self.num_heads
        return range(rows.start // size * size, -(-rows.stop // size) * size)

    def _in_order(self, stored: NDArray[T], rows: range) -> NDArray[T]:
        """Return rows as the model has them, of `_stored_rows`."""
        if not self.num_heads:
            return stored
        size = self.shape[0] // self.num_heads
        pairs = stored.reshape(-1, size // 2, 2, *stored.shape[1:])
        restored = pairs.swapaxes(1, 2).reshape(stored.shape)
        start = rows.start % size
        return restored[start : start + len(rows)]


def find_parts(model: GgufModel, expected: Iterable[str]) -> dict[str, GgufPart]:
    """Return name |-> part, for those that the file has."""
    found: dict[str, GgufPart] = {}
    architecture = architecture_of(model)
    for name in expected:
        place = place_of(name, architecture)
        part = _find(model, place)
        if part is not None:
            heads = _permuted_heads(model, place)
            found[name] = replace(part, num_heads=heads) if heads else part
    return found


def _find(model: GgufModel, place: Place) -> GgufPart | None:
    """The tensor at a place, or the expert's part of one."""
    tensors = model.tensors
    if place.expert is None or (place.name not in tensors and place.own_name in tensors):
        tensor = tensors.get(place.name if place.expert is None else place.own_name)
        if tensor is None:
            return None
        return GgufPart(tensor, _own_shape(tensor, place))
    tensor, first, count = tensors.get(place.name), 0, 1
    for half, kind in enumerate(("gate", "up")):
        fused = place.name.replace(f"ffn_{kind}_exps", "ffn_gate_up_exps")
        if tensor is None and fused in tensors:
            tensor, first, count = tensors[fused], half, 2
            break
    if tensor is None or place.expert >= tensor.shape[0]:
        return None
    if len(tensor.shape) == 2 and count == 1:  # biases
        return GgufPart(tensor, tensor.shape[1:], place.expert)
    if len(tensor.shape) != 3:
        return None
    _, rows, columns = tensor.shape
    own = rows // count
    return GgufPart(tensor, (own, columns), place.expert * rows + first * own)


def _own_shape(tensor: GgufTensor, place: Place) -> tuple[int, ...]:
    """That of the model's tensor, which is a matrix or a vector."""
    shape = tensor.shape
    if place.part == ONE_ROW and len(shape) == 1:
        return 1, *shape
    if place.part in OF_HEADS and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape


def _permuted_heads(model: GgufModel, place: Place) -> int:
    architecture = architecture_of(model)
    if not ARCHITECTURES[architecture].permutes_heads or place.part not in ("attn_q", "attn_k"):
        return 0
    fields = GgufFields(model.values, model.path, f"{architecture}.")
    num_heads = fields.integer("attention.head_count")
    if place.part == "attn_q":
        return num_heads
    return fields.integer("attention.head_count_kv", num_heads)
