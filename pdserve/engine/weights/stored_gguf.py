"""Tensors in GGUF files, decoded to float32 where they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.weights.stored import Found, Part, Shapes
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.gguf.config import PERMUTED, architecture_of
from pdserve.model_files.gguf.container import GgufTensor
from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.model_files.gguf.names import ROPE_DIVISORS, Place, place_of


@dataclass(frozen=True, slots=True)
class GgufPart:
    """A matrix or vector of the model, which may be some rows of a tensor."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0  # of a matrix, counted over all that the tensor has
    num_heads: int = 0  # whose rows are permuted: [2, half] is stored as [half, 2]; 0: none are

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`: float32."""
        slices = part if isinstance(part, tuple) else (part,)
        lengths = zip(slices, self.shape, strict=False)
        rows, *others = [range(*cut.indices(size)) for cut, size in lengths] or [
            range(self.shape[0])
        ]
        columns = others[0] if others else range(self.shape[-1])
        if len(self.shape) == 1:
            return torch.from_numpy(np.array(self._in_order(rows, range(1))[:, 0]))
        return torch.from_numpy(np.array(self._in_order(rows, columns)))

    def _in_order(self, rows: range, columns: range) -> NDArray[np.float32]:
        """Decode rows as the model has them."""
        if not self.num_heads:
            return self._decode(rows, columns)
        size = self.shape[0] // self.num_heads
        first, last = rows.start // size, -(-rows.stop // size)  # heads
        stored = self._decode(range(first * size, last * size), columns)
        pairs = stored.reshape(last - first, size // 2, 2, len(columns))
        restored = pairs.swapaxes(1, 2).reshape(stored.shape)
        return restored[rows.start - first * size : rows.stop - first * size]

    def _decode(self, rows: range, columns: range) -> NDArray[np.float32]:
        kind, data = self.tensor.type, self.tensor.data
        if len(self.shape) == 1:  # is one row in the file
            return kind.rows(data, self.shape[0], range(1), rows).T
        start = self.first_row
        return kind.rows(data, self.shape[1], range(start + rows.start, start + rows.stop), columns)


def gguf_tensors(checkpoint: Checkpoint, expected: Shapes) -> Found:
    """Find tensors. Raises as `stored.Reader`."""
    model = checkpoint.gguf
    assert model is not None, "the format was looked at"
    found: dict[str, GgufPart] = {}
    file_of: dict[str, Path] = {}
    used = {ROPE_DIVISORS}
    for name in expected:
        place = place_of(name)
        part = _find(model, place)
        if part is not None:
            heads = _permuted_heads(model, place)
            found[name] = replace(part, num_heads=heads) if heads else part
            file_of[name] = part.tensor.file.path
            used.add(part.tensor.name)
    others = [name for name in model.tensors if name not in used]
    in_order = sorted(found, key=lambda name: (str(file_of[name]), found[name].tensor.offset))
    tensors = {name: found[name] for name in in_order}
    return Found(tensors, file_of, others, lambda name: place_of(name).name)


def _find(model: GgufModel, place: Place) -> GgufPart | None:
    """The tensor at a place, or the expert's part of one."""
    tensors = model.tensors
    if place.expert is None or (place.name not in tensors and place.own_name in tensors):
        tensor = tensors.get(place.name if place.expert is None else place.own_name)
        return None if tensor is None else GgufPart(tensor, tensor.shape)
    tensor, first, count = tensors.get(place.name), 0, 1
    for half, kind in enumerate(("gate", "up")):
        fused = place.name.replace(f"ffn_{kind}_exps", "ffn_gate_up_exps")
        if tensor is None and fused in tensors:
            tensor, first, count = tensors[fused], half, 2
            break
    if tensor is None or len(tensor.shape) != 3 or place.expert >= tensor.shape[0]:
        return None
    _, rows, columns = tensor.shape
    own = rows // count
    return GgufPart(tensor, (own, columns), place.expert * rows + first * own)


def _permuted_heads(model: GgufModel, place: Place) -> int:
    architecture = architecture_of(model)
    if architecture not in PERMUTED or place.part not in ("attn_q", "attn_k"):
        return 0
    fields = GgufFields(model.values, model.path, f"{architecture}.")
    num_heads = fields.integer("attention.head_count")
    if place.part == "attn_q":
        return num_heads
    return fields.integer("attention.head_count_kv", num_heads)
