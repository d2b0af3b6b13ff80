"""Triton kernels for mixtures of experts. They check nothing: see experts.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_of(
    tile, starts, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_EXPERTS: tl.constexpr
):
    """Return the expert of a tile of places, and how many tiles of it are before.

    The expert is NUM_EXPERTS if there are not so many tiles.
    """
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_expert = experts < NUM_EXPERTS
    begin = tl.load(starts + experts, mask=is_expert, other=0)
    end = tl.load(starts + experts + 1, mask=is_expert, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    is_before = (tl.cumsum(tiles, axis=0) <= tile) & is_expert
    first_tile = tl.sum(tl.where(is_before, tiles, 0), axis=0)
    return tl.sum(is_before.to(tl.int64), axis=0), tile - first_tile


@triton.jit
def multiply_experts(
    x,  # [num_rows, num_in]
    weights,  # [num_experts, num_out, num_in]
    order,  # [num_places] int64: row * NUM_CHOSEN + which of its experts; sorted by expert
    starts,  # [num_experts + 1] int64: where the places of each expert begin
    bias,  # [num_experts, num_out]
    out,  # [num_places, num_out]
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,  # x has a row for each place
    HAS_BIAS: tl.constexpr,  # else bias is not read
    BLOCK_M: tl.constexpr,  # places
    BLOCK_N: tl.constexpr,  # outputs
    BLOCK_K: tl.constexpr,  # inputs
    BLOCK_EXPERTS: tl.constexpr,  # at least num_experts
):
    """One program: some outputs of some places of one expert. There may be programs too many."""
    expert, number = expert_of(tl.program_id(0), starts, NUM_EXPERTS, BLOCK_M, BLOCK_EXPERTS)
    if expert < NUM_EXPERTS:
        first = tl.load(starts + expert) + number * BLOCK_M
        places = first + tl.arange(0, BLOCK_M)
        is_place = places < tl.load(starts + expert + 1)
        rows = places
        if not IS_IN_PLACE:
            rows = tl.load(order + places, mask=is_place, other=0) // NUM_CHOSEN
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < NUM_OUT
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, NUM_IN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_input = k < NUM_IN
            some_x = tl.load(
                x + rows[:, None] * NUM_IN + k[None, :],
                mask=is_place[:, None] & is_input[None, :],
                other=0.0,
            )
            some_weights = tl.load(
                weights + (expert * NUM_OUT + columns[None, :]) * NUM_IN + k[:, None],
                mask=is_column[None, :] & is_input[:, None],
                other=0.0,
            )
            total = tl.dot(some_x, some_weights, total, input_precision="ieee")
        if HAS_BIAS:
            added = tl.load(bias + expert * NUM_OUT + columns, mask=is_column, other=0.0)
            total += added.to(tl.float32)[None, :]
        tl.store(
            out + places[:, None] * NUM_OUT + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=is_place[:, None] & is_column[None, :],
        )


@triton.jit
def add_up_experts(
    made,  # [num_places, size] float32
    weights,  # [num_rows, NUM_CHOSEN] float32
    places,  # [num_rows, NUM_CHOSEN] int64
    out,  # [num_rows, size] float32
    SIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < SIZE
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(NUM_CHOSEN):
        place = tl.load(places + row * NUM_CHOSEN + i)
        weight = tl.load(weights + row * NUM_CHOSEN + i)
        total += weight * tl.load(made + place * SIZE + at, mask=is_there, other=0.0)
    tl.store(out + row * SIZE + at, total, mask=is_there)
