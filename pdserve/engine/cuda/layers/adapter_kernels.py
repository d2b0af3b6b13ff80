"""Triton kernels for adapters. They check nothing: see adapters.py.

A table has a row for each slot of an adapter: the addresses of its A, its B, its bias and its
factors, 0 for one that it has not, and its number of ranks, 0 if it adds nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_rows(
    x,  # [num_rows, NUM_IN]
    table,  # [num_slots, 5] int64
    rows,  # [num_tiles * BLOCK_M] int32: of x; -1 fills up
    slots,  # [num_tiles] int32
    inner,  # [num_tiles * BLOCK_M, most_ranks] float32
    most_ranks,  # of all slots, in whatever matrix
    NUM_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,  # ranks, of which an adapter has a multiple
    BLOCK_K: tl.constexpr,
):
    """A x: one program is a tile of one adapter's rows, and some of its ranks."""
    tile = tl.program_id(0)
    entry = table + tl.load(slots + tile).to(tl.int64) * 5
    first = tl.program_id(1) * BLOCK_R
    if first < tl.load(entry + 4):
        a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        ranks = first + tl.arange(0, BLOCK_R)
        places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        own = tl.load(rows + places).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for start in range(0, NUM_IN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_input = k < NUM_IN
            some_x = tl.load(
                x + own[:, None] * NUM_IN + k[None, :],
                mask=(own >= 0)[:, None] & is_input[None, :],
                other=0.0,
            )
            some_a = tl.load(
                a + ranks[None, :] * NUM_IN + k[:, None], mask=is_input[:, None], other=0.0
            )
            total = tl.dot(some_x, some_a, total, input_precision="ieee")
        tl.store(inner + places[:, None] * most_ranks + ranks[None, :], total)


@triton.jit
def expand_rows(
    inner,  # [num_tiles * BLOCK_M, most_ranks] float32
    table,  # [num_slots, 5] int64
    rows,  # [num_tiles * BLOCK_M] int32: of y; -1 fills up
    slots,  # [num_tiles] int32
    base_bias,  # [NUM_OUT], of y's dtype: what factors leave alone; not read without HAS_BIAS
    y,  # [num_rows, NUM_OUT]
    most_ranks,  # as there
    NUM_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add B (A x) to y: one program is a tile of one adapter's rows, and some outputs."""
    tile = tl.program_id(0)
    entry = table + tl.load(slots + tile).to(tl.int64) * 5
    num_ranks = tl.load(entry + 4)
    if num_ranks > 0:
        b = tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty))
        bias, factors = tl.load(entry + 2), tl.load(entry + 3)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < NUM_OUT
        places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        own = tl.load(rows + places).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, num_ranks, BLOCK_R):
            ranks = start + tl.arange(0, BLOCK_R)
            some_inner = tl.load(inner + places[:, None] * most_ranks + ranks[None, :])
            some_b = tl.load(
                b + columns[None, :] * num_ranks + ranks[:, None],
                mask=is_column[None, :],
                other=0.0,
            )
            total = tl.dot(some_inner, some_b.to(tl.float32), total, input_precision="ieee")
        if bias != 0:
            at_bias = bias.to(tl.pointer_type(tl.float32)) + columns
            total += tl.load(at_bias, mask=is_column, other=0.0)[None, :]
        scale = tl.full((BLOCK_N,), 1.0, dtype=tl.float32)
        if factors != 0:
            at_factors = factors.to(tl.pointer_type(tl.float32)) + columns
            scale = tl.load(at_factors, mask=is_column, other=1.0)
        at = y + own[:, None] * NUM_OUT + columns[None, :]
        is_there = (own >= 0)[:, None] & is_column[None, :]
        made = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            kept = tl.load(base_bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
            made = (made - kept) * scale[None, :] + kept + total
        else:
            made = made * scale[None, :] + total
        tl.store(at, made.to(y.dtype.element_ty), mask=is_there)
