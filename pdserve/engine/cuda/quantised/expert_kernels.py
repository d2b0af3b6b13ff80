"""Triton kernel of quantised experts. It checks nothing: see experts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.cuda.layers.expert_kernels import expert_of
from pdserve.engine.cuda.quantised.product_kernels import products


@triton.jit
def multiply_quantised_experts(
    x,  # these as `product_kernels.multiply`; of weights, those of all experts
    scales_of_x,
    sums,
    codes,
    scales,
    minimums,
    super_scales,
    super_minimums,
    bias,
    order,  # these as `multiply_experts`
    starts,
    out,  # [num_places, num_out]
    num_in,
    num_out,
    held,
    padded,
    plane_bytes,
    num_scales,  # of an expert, as are these
    num_supers,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SHARE: tl.constexpr,
    IS_NESTED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: some outputs of some places of one expert. There may be programs too many."""
    expert, number = expert_of(tl.program_id(0), starts, NUM_EXPERTS, BLOCK_M, BLOCK_EXPERTS)
    if expert < NUM_EXPERTS:
        places = tl.load(starts + expert) + number * BLOCK_M + tl.arange(0, BLOCK_M)
        is_place = places < tl.load(starts + expert + 1)
        rows = places
        if not IS_IN_PLACE:
            rows = tl.load(order + places, mask=is_place, other=0) // NUM_CHOSEN
        columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < num_out
        y = products(
            x,
            scales_of_x,
            sums,
            codes + expert * held * num_out // (8 // BITS),
            scales + expert * num_scales,
            minimums + expert * num_scales,
            super_scales + expert * num_supers,
            super_minimums + expert * num_supers,
            bias + expert * num_out,
            rows,
            is_place,
            columns,
            is_column,
            num_in,
            num_out,
            held,
            padded,
            plane_bytes,
            IS_FLOAT,
            BITS,
            GROUP,
            ZERO,
            HAS_SCALES,
            SHARE,
            IS_NESTED,
            HAS_MINIMUMS,
            HAS_BIAS,
            CHUNKS,
            BLOCK_M,
            BLOCK_N,
        )
        tl.store(
            out + places[:, None] * num_out + columns[None, :],
            y.to(out.dtype.element_ty),
            mask=is_place[:, None] & is_column[None, :],
        )
