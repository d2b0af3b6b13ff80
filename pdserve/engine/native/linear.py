"""A weight matrix packed in the order in which the CPU kernels read it: csrc/linear/layout.h."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve import _native
from pdserve.engine.plan.forms import WeightForm
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.weights.quantise import quantised
from pdserve.model_files.coding import Codes

PANEL_OUTPUTS = 16
ALIGNMENT = 64


class LinearResult(StrEnum):
    """What to do with the product y = x · weightᵀ + bias."""

    STORE = "store"  # out = y, of x's dtype
    STORE_FLOAT = "store_float"  # out = y, float32
    ADD = "add"  # out += y, float32
    GATED_SILU = "gated_silu"  # out = silu(gate) * up, of x's dtype; this or a later one if gated
    GATED_GELU = "gated_gelu"  # out = gelu(gate) * up, likewise
    GATED_CLAMPED = "gated_clamped"  # as Activation.CLAMPED


@dataclass(frozen=True, slots=True)
class PackedSize:
    """The sizes of a packed matrix."""

    num_bytes: int  # size of `weights`
    num_lanes: int  # length of `scales` and of `bias`: outputs, padded to whole panels


def packed_size(
    form: WeightForm, num_out: int, num_in: int, *, is_gated: bool = False
) -> PackedSize:
    """Return the required sizes of the tensors of a PackedLinear."""
    return PackedSize(*_native.packed_size(form, num_out, num_in, is_gated))


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed layer x · weightᵀ + bias. All tensors may be in one memory-mapped file.

    Scales and biases are in the order of the panels, with zeros for padded outputs.
    """

    form: WeightForm
    num_out: int
    num_in: int
    weights: Tensor  # [num_bytes] uint8, aligned to 64 bytes
    scales: Tensor | None  # [num_lanes] float32, if the form has any
    bias: Tensor | None  # [num_lanes] float32
    is_gated: bool = False  # rows of gate, then of up, packed to give silu(gate) * up in one pass

    @classmethod
    def of(cls, matrix: Matrix, arrays: Mapping[str, Tensor]) -> PackedLinear:
        """Return a matrix of a plan, whose tensors are `arrays` by the names of `named`."""
        return cls(
            form=matrix.form,
            num_out=matrix.num_out,
            num_in=matrix.num_in,
            weights=arrays[f"{matrix.name}.weights"],
            scales=arrays.get(f"{matrix.name}.scales"),
            bias=arrays.get(f"{matrix.name}.bias"),
            is_gated=matrix.is_gated,
        )

    def named(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors by their names in packed files, if that is its name."""
        parts = {"weights": self.weights, "scales": self.scales, "bias": self.bias}
        for part, tensor in parts.items():
            if tensor is not None:
                yield f"{name}.{part}", tensor

    @property
    def num_columns(self) -> int:
        """Number of columns of the result."""
        return self.num_out // 2 if self.is_gated else self.num_out


def empty_packed(
    form: WeightForm, num_out: int, num_in: int, *, is_gated: bool = False, has_bias: bool = False
) -> PackedLinear:
    """Allocate memory for a packed matrix, to be filled by pack_rows or, if coded, pack_codes."""
    size = packed_size(form, num_out, num_in, is_gated=is_gated)
    return PackedLinear(
        form=form,
        num_out=num_out,
        num_in=num_in,
        weights=aligned_bytes(size.num_bytes),
        scales=torch.zeros(size.num_lanes) if form.has_row_scales else None,
        bias=torch.zeros(size.num_lanes) if has_bias else None,
        is_gated=is_gated,
    )


def pack_rows(
    packed: PackedLinear, first_row: int, weight: Tensor, bias: Tensor | None = None
) -> None:
    """Pack `weight` [num_rows, num_in] into the rows of `packed` from `first_row` on, in its form.

    In a gated matrix, gate is packed at row 0 and up at row num_out / 2. Rows may come from any
    number of tensors, at any first_row, in any order.

    Raises:
        ValueError: shapes do not match; a bias is given although `packed` has none, or is missing
            although it has one; or a value is not finite, and the form is quantised.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    _check_bias(packed, len(weight), bias)
    if packed.form.coding is not None:
        pack_codes(packed, first_row, quantised(weight, packed.form.coding), bias)
        return
    _native.pack_linear_rows(packed, first_row, weight)
    _put_bias(packed, first_row, bias)


def pack_codes(
    packed: PackedLinear, first_row: int, codes: Codes, bias: Tensor | None = None
) -> None:
    """Pack codes into rows as pack_rows does weights. The matrix's coding must hold theirs."""
    assert packed.form.coding is not None, "as planned"
    _check_bias(packed, len(codes.codes), bias)
    held = codes.within(packed.form.coding)
    _native.pack_linear_codes(
        packed,
        first_row,
        torch.from_numpy(np.ascontiguousarray(held.codes)),
        _bytes_of(held.scales),
        None if held.minimums is None else _bytes_of(held.minimums),
        None if held.super_scales is None else _bytes_of(held.super_scales),
        None if held.super_minimums is None else _bytes_of(held.super_minimums),
    )
    _put_bias(packed, first_row, bias)


def _bytes_of(numbers: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers).view(np.uint8))


def _check_bias(packed: PackedLinear, num_rows: int, bias: Tensor | None) -> None:
    if (bias is None) != (packed.bias is None):
        raise ValueError(f"bias: expected {'none' if packed.bias is None else 'one'}")
    if bias is not None and bias.shape != (num_rows,):
        expected, found = [num_rows], list(bias.shape)
        raise ValueError(f"bias: expected shape [num_rows] = {expected}, found {found}")


def _put_bias(packed: PackedLinear, first_row: int, bias: Tensor | None) -> None:
    if bias is not None and packed.bias is not None:
        lanes = lanes_of_rows(packed.num_out, is_gated=packed.is_gated)
        packed.bias[lanes[first_row : first_row + len(bias)]] = bias.float()


def pack(
    weight: Tensor, bias: Tensor | None = None, *, form: WeightForm, is_gated: bool = False
) -> PackedLinear:
    """Pack a whole matrix [num_out, num_in] into newly allocated memory."""
    packed = empty_packed(form, *weight.shape, is_gated=is_gated, has_bias=bias is not None)
    pack_rows(packed, 0, weight, bias)
    return packed


def linear(
    x: Tensor,
    packed: PackedLinear,
    out: Tensor,
    result: LinearResult = LinearResult.STORE,
    variant: str = "",
) -> Tensor:
    """Multiply x [num_rows, num_in] by the packed matrix into `out`; return `out`."""
    _native.linear(x, packed, out, result, variant)
    return out


def lanes_of_rows(num_out: int, *, is_gated: bool) -> Tensor:
    """Return a map from row of the matrix to lane, over all panels: [num_out] int64."""
    if not is_gated:
        return torch.arange(num_out)
    half = torch.arange(num_out // 2)
    gate = half // PANEL_OUTPUTS * 2 * PANEL_OUTPUTS + half % PANEL_OUTPUTS
    return torch.cat([gate, gate + PANEL_OUTPUTS])


def aligned_bytes(num_bytes: int) -> Tensor:
    """Allocate [num_bytes] uint8 of zeros, with the alignment that the kernels need."""
    memory = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + num_bytes]
