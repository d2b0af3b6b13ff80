"""A weight matrix in the order that the CPU kernels read it: csrc/linear/layout.h."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pdserve import _native

PANEL_OUTPUTS = 16
ALIGNMENT = 64


class WeightKind(StrEnum):
    """How an element of a packed matrix is stored."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # weight-only, one scale per output channel


class Result(StrEnum):
    """What becomes of y = x · weightᵀ + bias."""

    STORE = "store"  # out = y, of x's dtype
    STORE_FLOAT = "store_float"  # out = y, float32
    ADD = "add"  # out += y, float32
    GATED_SILU = "gated_silu"  # out = silu(gate) * up, of x's dtype; if and only if gated


@dataclass(frozen=True, slots=True)
class PackedSize:
    """What a packed matrix takes."""

    num_bytes: int  # of `weights`
    num_lanes: int  # of `scales` and of `bias`: outputs, padded to whole panels


def packed_size(
    kind: WeightKind, num_out: int, num_in: int, *, is_gated: bool = False
) -> PackedSize:
    """What PackedLinear's tensors are to hold."""
    return PackedSize(*_native.packed_size(kind, num_out, num_in, is_gated))


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x · weightᵀ + bias. All tensors may lie in one memory-mapped file.

    Scales and biases stand in the order of the panels, with zeros where outputs are padded.
    """

    kind: WeightKind
    num_out: int
    num_in: int
    weights: Tensor  # [num_bytes] uint8, aligned to 64 bytes
    scales: Tensor | None  # [num_lanes] float32, of INT8
    bias: Tensor | None  # [num_lanes] float32
    is_gated: bool = False  # gate above up, packed so that one pass gives silu(gate) * up

    @property
    def num_columns(self) -> int:
        """Of a product."""
        return self.num_out // 2 if self.is_gated else self.num_out


def empty_packed(
    kind: WeightKind, num_out: int, num_in: int, *, is_gated: bool = False, has_bias: bool = False
) -> PackedLinear:
    """Memory for a packed matrix, to be filled by pack_rows."""
    size = packed_size(kind, num_out, num_in, is_gated=is_gated)
    return PackedLinear(
        kind=kind,
        num_out=num_out,
        num_in=num_in,
        weights=aligned_bytes(size.num_bytes),
        scales=torch.zeros(size.num_lanes) if kind is WeightKind.INT8 else None,
        bias=torch.zeros(size.num_lanes) if has_bias else None,
        is_gated=is_gated,
    )


def pack_rows(
    packed: PackedLinear, first_row: int, weight: Tensor, bias: Tensor | None = None
) -> None:
    """Pack `weight` [num_rows, num_in] as rows first_row, ... of `packed`, which it writes to.

    A gated matrix is gate above up, so gate is packed at row 0 and up at row num_out / 2. Rows may
    come from any number of tensors, at any first_row, in any order.

    Raises:
        ValueError: shapes do not fit; a bias where `packed` has no room for it, or none where it
            has; a value is not finite, and the kind is INT8.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    if (bias is None) != (packed.bias is None):
        raise ValueError(f"bias: expected {'none' if packed.bias is None else 'one'}")
    if bias is not None and bias.shape != weight.shape[:1]:
        expected, found = list(weight.shape[:1]), list(bias.shape)
        raise ValueError(f"bias: expected shape [num_rows] = {expected}, found {found}")
    _native.pack_linear_rows(packed, first_row, weight)
    if bias is not None and packed.bias is not None:
        lanes = lanes_of_rows(packed.num_out, is_gated=packed.is_gated)
        packed.bias[lanes[first_row : first_row + len(weight)]] = bias.float()


def pack(
    weight: Tensor, bias: Tensor | None = None, *, kind: WeightKind, is_gated: bool = False
) -> PackedLinear:
    """A whole matrix [num_out, num_in], in memory of its own."""
    packed = empty_packed(kind, *weight.shape, is_gated=is_gated, has_bias=bias is not None)
    pack_rows(packed, 0, weight, bias)
    return packed


def unpack(packed: PackedLinear) -> Tensor:
    """[num_out, num_in] float32, what the packed weights stand for. Written from the layout."""
    size = packed_size(packed.kind, packed.num_out, packed.num_in, is_gated=packed.is_gated)
    panels = packed.weights.view(size.num_lanes // PANEL_OUTPUTS, -1)  # rows of bytes
    dtype, inputs = {
        WeightKind.FLOAT32: (torch.float32, 1),
        WeightKind.BFLOAT16: (torch.bfloat16, 2),
        WeightKind.INT8: (torch.int8, 2),
    }[packed.kind]
    groups = panels.view(dtype).float().view(len(panels), -1, PANEL_OUTPUTS, inputs)
    rows = groups.permute(0, 2, 1, 3).reshape(size.num_lanes, -1)[:, : packed.num_in]
    if packed.scales is not None:
        rows = rows * packed.scales[:, None]
    return rows[lanes_of_rows(packed.num_out, is_gated=packed.is_gated)]


def linear(
    x: Tensor, packed: PackedLinear, out: Tensor, result: Result = Result.STORE, variant: str = ""
) -> Tensor:
    """x [num_rows, num_in] times the packed matrix, into `out`; returns `out`."""
    _native.linear(x, packed, out, result, variant)
    return out


def lanes_of_rows(num_out: int, *, is_gated: bool) -> Tensor:
    """[num_out] int64, row of the matrix |-> its place among the lanes of all panels."""
    if not is_gated:
        return torch.arange(num_out)
    half = torch.arange(num_out // 2)
    gate = half // PANEL_OUTPUTS * 2 * PANEL_OUTPUTS + half % PANEL_OUTPUTS
    return torch.cat([gate, gate + PANEL_OUTPUTS])


def aligned_bytes(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros, aligned as the kernels want it."""
    memory = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + num_bytes]
