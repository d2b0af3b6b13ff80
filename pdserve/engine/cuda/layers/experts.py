"""A mixture of experts on a GPU: rows sorted by expert, and a product for the rows of each.

How many rows an expert has is known to the GPU alone, so nothing waits for it, and the launches are
the same whatever the rows choose: a step can be a graph.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.cuda.layers.expert_kernels import add_up_experts, multiply_experts
from pdserve.engine.cuda.quantised.experts import Places, multiply_stack
from pdserve.engine.cuda.quantised.linear import QuantisedLinear
from pdserve.engine.experts import Experts, choose_experts
from pdserve.engine.layers import Gated, Linear

_TILES: Final = (16, 32, 64)  # numbers of rows, ascending; tensor cores compute their products
_BLOCK: Final = 1024


def mix_experts(x: Tensor, layer: Experts, gated: Gated) -> Tensor:
    """Return the weighted sums of what its experts make of each row, a shared one too.

    Args:
        x: [num_rows, hidden_size], contiguous, of the dtype of the experts.
        layer: the experts.
        gated: their activation, one of `rows.GATED`.

    Returns:
        [num_rows, hidden_size] float32, contiguous.
    """
    size = layer.gate_up.in_features
    if x.shape[1:] != (size,) or not x.is_contiguous():
        raise ValueError(f"rows of shape {list(x.shape)} for experts of {size} inputs")
    tile = _tile_of(len(x) * layer.config.num_chosen, layer.config.num_experts)
    mixed = _mixed(x, layer, gated, tile)
    return mixed if layer.shared is None else mixed.add_(layer.shared(x, gated))


def warm_up(layer: Experts, gated: Gated, dtype: torch.dtype) -> None:
    """Launch every kernel for all tiles, so that no request waits for a compiler; `dtype`: of x."""
    size, device = layer.gate_up.in_features, layer.gate_up.weight.device
    x = torch.zeros((1, size), dtype=dtype, device=device)
    for tile in _TILES:
        _mixed(x, layer, gated, tile)


def _tile_of(num_places: int, num_experts: int) -> int:
    """Return how many rows tiles have: about as many as experts have places in the mean."""
    mean = -(-num_places // num_experts)
    return next((tile for tile in _TILES if tile >= mean), _TILES[-1])


def _mixed(x: Tensor, layer: Experts, gated: Gated, tile: int) -> Tensor:
    routing = choose_experts(x, layer.router, layer.config, layer.score_bias)
    places = sorted_by_expert(routing.experts, layer.config.num_experts)
    inner = gated(_product(x, layer.gate_up, places, tile, x.dtype, is_in_place=False))
    made = _product(inner, layer.down, places, tile, torch.float32, is_in_place=True)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if len(x):
        add_up_experts[(len(x), -(-x.shape[1] // _BLOCK))](
            made,
            routing.weights,
            places.of_rows,
            out,
            SIZE=x.shape[1],
            NUM_CHOSEN=places.num_chosen,
            BLOCK=_BLOCK,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return out


def sorted_by_expert(chosen: Tensor, num_experts: int) -> Places:
    """Put rows side by side for each expert. `chosen`: [num_rows, num_chosen] int64."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(max(len(order), num_experts + 1), device=chosen.device)
    of_rows = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    starts = torch.searchsorted(experts, numbers[: num_experts + 1])
    return Places(order, starts, of_rows.view(chosen.shape), chosen.shape[1])


def _product(
    x: Tensor,
    stack: Linear,
    places: Places,
    tile: int,
    dtype: torch.dtype,
    *,
    is_in_place: bool,
) -> Tensor:
    """Multiply each row by the weights of its expert.

    Args:
        x: [num_rows, num_in], or with `is_in_place` [num_places, num_in].
        stack: of all experts.
        places: of the rows.
        tile: one of _TILES.
        dtype: of the result.
        is_in_place: x is sorted already.

    Returns:
        [num_places, num_out].
    """
    weights, bias = stack.weight, stack.bias
    num_experts, num_places = len(weights), len(places.order)
    # Each expert ends with a tile that may not be full.
    num_tiles = min(num_places, num_places // tile + num_experts)
    if isinstance(stack, QuantisedLinear):
        return multiply_stack(
            x, stack.weights, places, tile, num_tiles, dtype, is_in_place=is_in_place
        )
    _, num_out, num_in = weights.shape
    if x.dtype != weights.dtype:
        raise TypeError(f"rows of {x.dtype} for experts of {weights.dtype}")
    out = torch.empty((num_places, num_out), dtype=dtype, device=x.device)
    if num_places == 0:
        return out
    block_n, block_k = (128, 64) if x.dtype.itemsize == 2 else (64, 32)
    multiply_experts[(num_tiles, -(-num_out // block_n))](
        x,
        weights,
        places.order,
        places.starts,
        weights if bias is None else bias,
        out,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=places.num_chosen,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        IS_IN_PLACE=is_in_place,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        enable_fp_fusion=True,
        num_warps=4,
    )
    return out
