"""Several tensors one behind the other in one piece of memory, so that one copy moves them all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # of a tensor
_ALIGNMENT: Final = 16  # bytes, of each tensor


class Packing:
    """Where each of some tensors is in a piece of memory."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self.num_bytes = 0
        self._parts: list[tuple[int, int, Shape]] = []  # begin and end in bytes
        for shape in shapes:
            begin, end = self.num_bytes, self.num_bytes + math.prod(shape[0]) * shape[1].itemsize
            self._parts.append((begin, end, shape))
            self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Packing:
        """Return the packing of tensors like these."""
        return cls((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors in this memory: uint8, of at least `num_bytes`, on any device."""
        return [
            memory[begin:end].view(dtype).view(shape) for begin, end, (shape, dtype) in self._parts
        ]
