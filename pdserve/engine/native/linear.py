"""A weight matrix in the order that the CPU kernels read it; csrc/linear has that order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class WeightKind(StrEnum):
    """How an element of a packed matrix is stored."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # weight-only, one scale per output channel


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x · weightᵀ + bias. All tensors may lie in one memory-mapped file."""

    kind: WeightKind
    num_out: int
    num_in: int
    weights: Tensor  # [num_bytes] uint8, aligned to 64 bytes
    scales: Tensor | None  # [num_out] float32, of INT8
    bias: Tensor | None  # [num_out] float32
    is_gated: bool = False  # gate and up, packed so that one pass gives silu(gate) * up
