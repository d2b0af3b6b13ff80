"""Tensors in GGUF files: decoded to float32 where they are read, or taken as the codes they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.weights.gguf_parts import GgufPart, find_parts
from pdserve.engine.weights.stored.tensors import Found, Part, Shapes
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.coding import Codes, Coding
from pdserve.model_files.gguf.config import architecture_of
from pdserve.model_files.gguf.names import ROPE_DIVISORS, ROPE_FACTORS, place_of


@dataclass(frozen=True, slots=True)
class StoredGguf:
    """See `CodedTensor`."""

    part: GgufPart

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredTensor`."""
        return self.part.shape

    @property
    def coding(self) -> Coding | None:
        """See `CodedTensor`."""
        return self.part.coding

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`: float32."""
        decoded = self.part.decoded(*self._ranges(part))
        return torch.from_numpy(np.array(decoded[:, 0] if len(self.shape) == 1 else decoded))

    def coded(self, part: Part) -> Codes:
        """See `CodedTensor`."""
        return self.part.codes(*self._ranges(part))

    def bad_row(self) -> int | None:
        """See `ScaledTensor`."""
        return self.part.bad_row()

    def _ranges(self, part: Part) -> tuple[range, range]:
        """Rows and columns."""
        slices = part if isinstance(part, tuple) else (part,)
        lengths = zip(slices, self.shape, strict=False)
        rows, *others = [range(*cut.indices(size)) for cut, size in lengths] or [
            range(self.shape[0])
        ]
        return rows, others[0] if others else range(self.shape[-1])


def gguf_tensors(checkpoint: Checkpoint, expected: Shapes) -> Found:
    """Find tensors. Raises as `stored.Reader`."""
    model = checkpoint.gguf
    assert model is not None, "the format was looked at"
    architecture = architecture_of(model)
    found = find_parts(model, expected)
    file_of = {name: part.tensor.file.path for name, part in found.items()}
    used = {ROPE_DIVISORS, *ROPE_FACTORS.values(), *(part.tensor.name for part in found.values())}
    others = [name for name in model.tensors if name not in used]
    in_order = sorted(found, key=lambda name: (str(file_of[name]), found[name].tensor.offset))
    tensors = {name: StoredGguf(found[name]) for name in in_order}
    return Found(tensors, file_of, others, lambda name: place_of(name, architecture).name)
