"""Launches products of rows with the quantised weights of the experts that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.cuda.quantised.expert_kernels import multiply_quantised_experts
from pdserve.engine.cuda.quantised.products import Tile, Weights, check, constants, operands

_COLUMNS: Final = 64


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows are, side by side for each expert. A row is there once for each it chooses."""

    order: Tensor  # [num_places] int64: place |-> row * num_chosen + which of its experts
    starts: Tensor  # [num_experts + 1] int64: where the places of each expert begin
    of_rows: Tensor  # [num_rows, num_chosen] int64, the inverse of `order`
    num_chosen: int


def multiply_stack(
    x: Tensor,
    weights: Weights,
    places: Places,
    tile: int,
    num_tiles: int,
    dtype: torch.dtype,
    *,
    is_in_place: bool,
) -> Tensor:
    """Multiply each row by the weights of its expert, as `layers.experts` does plain ones.

    Args:
        x: [num_rows, num_in], or with `is_in_place` [num_places, num_in]; as `multiply` wants it.
        weights: of all experts.
        places: of the rows.
        tile: rows of a program, 16 to 64.
        num_tiles: at least as many as there are.
        dtype: of the result.
        is_in_place: x is sorted already.

    Returns:
        [num_places, num_out].
    """
    check(x, weights)
    num_places, num_experts, num_out = len(places.order), len(weights.codes), weights.num_out
    out = torch.empty((num_places, num_out), dtype=dtype, device=x.device)
    if num_places == 0:
        return out
    supers = weights.super_scales
    # Floats: with up to 32 rows, tiles are multiplied by one instruction, in one order.
    rows = min(tile, 32) if weights.kind.is_float else tile
    if rows < tile:
        num_tiles = min(num_places, num_places // rows + num_experts)
    # With fewer warps, an A100's registers do not hold what 64 rows of nested codes need.
    shape = Tile(rows, _COLUMNS, 1, 8 if rows > 32 else 4, 4)
    multiply_quantised_experts[(num_tiles, triton.cdiv(num_out, _COLUMNS))](
        *operands(x, weights),
        places.order,
        places.starts,
        out,
        weights.num_in,
        num_out,
        weights.held,
        weights.padded,
        len(x) * weights.padded,
        weights.scales[0].numel(),
        0 if supers is None else supers[0].numel(),
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=places.num_chosen,
        IS_IN_PLACE=is_in_place,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        **constants(weights, shape),
    )
    return out
