"""Launches products with quantised weights.

A row's bits depend on that row and the weights alone: tiles differ with the number of rows, but of
codes all sums are exact and the rest has one order, which is that of CPUs, whose bits they have. Of
floats, all tiles are multiplied by the same instruction in the same order of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from pdserve.engine.cuda.quantised import product_kernels as kernels
from pdserve.engine.plan.forms import WeightForm
from pdserve.model_files.coding import SUPER_INPUTS, ScaleType

CHUNK: Final = 64  # inputs that lie together
_UNSCALED: Final = 512  # inputs whose sums 32 bits hold, where no group has a scale
_FEW_CHUNKS: Final = 4  # a turn of few rows: so much is read ahead that memory is kept busy
_BLOCKS: Final = 32  # of 32 inputs, that are made integers at a time


@dataclass(frozen=True, slots=True)
class Kind:
    """What kernels are compiled for."""

    bits: int = 8  # of a code in memory: 4 or 8
    group: int = _UNSCALED  # inputs that share a scale
    zero: int = 128  # taken away from each code
    has_scales: bool = False  # of groups; else each output has one
    share: int = 0  # groups that share a number; 0: none do
    is_nested: bool = False  # codes make bytes, with a scale and a minimum of 32 inputs
    has_minimums: bool = False  # beside those
    is_float: bool = False  # codes are e4m3

    def padded(self, num_in: int) -> int:
        """Inputs, in whole groups, and in whole turns of all tiles."""
        whole = max(_FEW_CHUNKS * CHUNK, self.group)
        return -(-num_in // whole) * whole

    @classmethod
    def of(cls, form: WeightForm) -> Kind:
        """Return that of a form. Codes have 4 or 8 bits."""
        coding = form.coding
        if coding is None:
            return cls(is_float=form.dtype != "int8")
        assert coding.bits in (4, 8), form.name
        if coding.scale is ScaleType.NESTED:
            return cls(coding.bits, SUPER_INPUTS, 0, has_scales=True, is_nested=True)
        share = SUPER_INPUTS // coding.group if coding.scale.has_supers else 0
        lows = coding.has_minimums
        return cls(coding.bits, coding.group, coding.zero, True, share, False, lows)


class Weights(NamedTuple):
    """A matrix as kernels take it: see linear.py. Of a stack, each has one dimension more."""

    kind: Kind
    num_in: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    super_scales: Tensor | None
    super_minimums: Tensor | None
    bias: Tensor | None

    @property
    def num_out(self) -> int:
        """Outputs."""
        return self.codes.shape[-2]

    @property
    def held(self) -> int:
        """Inputs, in whole chunks."""
        return self.codes.shape[-3] * CHUNK

    @property
    def padded(self) -> int:
        """Inputs, in whole turns."""
        return self.kind.padded(self.num_in)


class Integers(NamedTuple):
    """Rows of integers: see `product_kernels.quantise_rows`."""

    planes: Tensor
    scales: Tensor
    sums: Tensor


class Tile(NamedTuple):
    """What a program computes, and with how much."""

    rows: int
    columns: int
    chunks: int  # a turn
    num_warps: int
    num_stages: int


# Few rows are bound by memory: many programs read few outputs each. Many rows are for tensor cores.
_TILES: Final = (Tile(16, 32, _FEW_CHUNKS, 4, 4), Tile(64, 64, 1, 4, 4), Tile(128, 64, 1, 8, 4))
# Tiles of more rows might be multiplied by another instruction, and sums have another order.
_FLOAT_TILES: Final = (Tile(16, 32, 1, 4, 6), Tile(32, 128, 1, 4, 4))


def tiles_of(kind: Kind) -> tuple[Tile, ...]:
    """Return all tiles, ascending."""
    return _FLOAT_TILES if kind.is_float else _TILES


def multiply(x: Tensor, weights: Weights, dtype: torch.dtype | None = None) -> Tensor:
    """Return x · weightᵀ + bias, one after the other in float32, rounded once.

    Args:
        x: [num_rows, num_in] bfloat16 or float16, contiguous.
        weights: no stack.
        dtype: of the result; None: that of x.

    Returns:
        [num_rows, num_out], contiguous.
    """
    tiles = tiles_of(weights.kind)
    tile = next((each for each in tiles if each.rows >= len(x)), tiles[-1])
    return _multiplied(x, weights, tile, x.dtype if dtype is None else dtype)


def warm_up(weights: Weights, dtype: torch.dtype) -> None:
    """Compile what products of this matrix launch; `dtype`: of x."""
    x = torch.zeros((1, weights.num_in), dtype=dtype, device=weights.codes.device)
    for tile in tiles_of(weights.kind):
        _multiplied(x, weights, tile, dtype)


def integers_of(x: Tensor, weights: Weights) -> Integers:
    """Make integers of rows, as these weights are multiplied by. See `multiply`."""
    num_rows, num_in = x.shape
    padded, summed = weights.padded, 16 if weights.kind.group == 16 else 32
    num_blocks = -(-num_in // 32)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    found = Integers(
        empty(2, num_rows, padded, dtype=torch.int8),
        empty(num_rows, dtype=torch.float32),
        empty(num_rows, padded // summed, dtype=torch.int32),
    )
    if num_rows:
        kernels.quantise_rows[(num_rows,)](
            x,
            *found,
            empty(num_rows, num_blocks, dtype=torch.float32),
            num_in,
            num_blocks,
            padded,
            found.planes[0].numel(),
            SUMMED=summed,
            BLOCKS=_BLOCKS,
            enable_fp_fusion=False,
            num_warps=4,
        )
    return found


def check(x: Tensor, weights: Weights) -> None:
    """Raises TypeError, ValueError: x cannot be multiplied by these."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"rows of {x.dtype} for quantised weights: bfloat16 or float16")
    if x.ndim != 2 or x.shape[1] != weights.num_in or not x.is_contiguous():
        raise ValueError(
            f"rows of shape {list(x.shape)} for {weights.num_in} inputs, or not contiguous"
        )


def operands(x: Tensor, weights: Weights) -> tuple[Tensor, ...]:
    """Return what kernels read, in their order: x, its scales and sums, and all of weights."""
    kind, codes, scales = weights.kind, weights.codes, weights.scales
    of_x = (x, scales, codes) if kind.is_float else integers_of(x, weights)
    others = (weights.minimums, weights.super_scales, weights.super_minimums, weights.bias)
    # What is not there is not read.
    return *of_x, codes, scales, *(scales if each is None else each for each in others)


def constants(weights: Weights, tile: Tile) -> dict[str, object]:
    """Return what kernels are compiled for, and with."""
    kind = weights.kind
    chunks, num_stages = _turns(kind, tile)
    return {
        "IS_FLOAT": kind.is_float,
        "BITS": kind.bits,
        "GROUP": kind.group,
        "ZERO": kind.zero,
        "HAS_SCALES": kind.has_scales,
        "SHARE": kind.share,
        "IS_NESTED": kind.is_nested,
        "HAS_MINIMUMS": kind.has_minimums,
        "HAS_BIAS": weights.bias is not None,
        "CHUNKS": chunks,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "enable_fp_fusion": False,
        "num_warps": tile.num_warps,
        "num_stages": num_stages,
    }


def _turns(kind: Kind, tile: Tile) -> tuple[int, int]:
    """Return the chunks of a turn, and how many turns are in flight: as many as registers hold."""
    if tile.chunks == _FEW_CHUNKS and kind.group == 16:
        return 2, tile.num_stages  # halves of blocks have scales of their own
    if tile.chunks == _FEW_CHUNKS and kind.group >= 2 * CHUNK and kind.has_minimums:
        return 2, 6  # a B200's
    return tile.chunks, tile.num_stages


def _multiplied(x: Tensor, weights: Weights, tile: Tile, dtype: torch.dtype) -> Tensor:
    check(x, weights)
    num_rows, num_out = len(x), weights.num_out
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    grid = (-(-num_rows // tile.rows), triton.cdiv(num_out, tile.columns))
    kernels.multiply[grid](
        *operands(x, weights),
        out,
        num_rows,
        weights.num_in,
        num_out,
        weights.held,
        weights.padded,
        num_rows * weights.padded,
        **constants(weights, tile),
    )
    return out
