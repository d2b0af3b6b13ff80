"""Triton kernels for the work between products and attention. They check nothing: see rows.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.cuda.attention.code_kernels import codes_of, is_no_number, scale_of


@triton.jit
def add_rms_norm_rows(
    residual,  # [num_rows, size]; the delta is added to it, if it is float32
    delta,  # [num_rows, size]
    weight,  # [size]
    out,  # [num_rows, size]
    eps,
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    is_there = at < SIZE
    x = tl.load(residual + row + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row + at, mask=is_there, other=0.0).to(tl.float32)
        tl.store(residual + row + at, x, mask=is_there)
    mean_square = tl.sum(x * x, axis=0) / SIZE
    scaled = x * (1.0 / tl.sqrt_rn(mean_square + eps))
    scaled *= tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def activate_and_multiply_rows(
    gate_up,  # [num_rows, 2 * size]
    out,  # [num_rows, size]
    ACTIVATION: tl.constexpr,  # as Activation
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=is_there, other=0.0).to(tl.float32)
    angle = gate
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        angle = 1.702 * gate
    if ACTIVATION == "gelu_tanh":
        # Beyond 9 it is the gate or 0; exp would be infinite.
        near = tl.minimum(tl.maximum(gate, -9.0), 9.0)
        angle = 1.5957691216057308 * (near + 0.044715 * near * near * near)
    result = gate / (1.0 + tl.exp(-angle)) * up
    tl.store(out + row * SIZE + at, result.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def rotate_and_write_heads(
    qkv,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    cos,  # [num_tokens, head_dim / 2] float32
    sin,
    qk_norm,  # [num_heads + num_kv_heads, head_dim]
    slot_mapping,  # [num_tokens] int64
    query,  # [num_tokens, num_heads, head_dim]
    kv_layer,  # pointer to block 0's keys of this layer
    kv_scales,  # the same memory as float32
    block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_DIM: tl.constexpr,  # elements of a row of the pool: more than HEAD_DIM if it has codes
    BLOCK_SIZE: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least head_dim / 2
):
    """One program: some heads of one token. Both halves of a head are rotated together."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, BLOCK)[None, :]
    is_there = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (at < HALF)
    is_rotated = heads < NUM_HEADS + NUM_KV_HEADS  # values are only moved
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads) * HEAD_DIM + at
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_there, other=0.0).to(tl.float32)
    x, y = first, second
    if HAS_QK_NORM:
        squares = tl.sum(x * x + y * y, axis=1, keep_dims=True)
        factor = 1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps)
        weight = qk_norm + heads * HEAD_DIM + at
        has_weight = is_there & is_rotated
        x *= factor * tl.load(weight, mask=has_weight, other=0.0).to(tl.float32)
        y *= factor * tl.load(weight + HALF, mask=has_weight, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + at, mask=at < HALF, other=0.0)
    s = tl.load(sin + token * HALF + at, mask=at < HALF, other=0.0)
    first, second = (
        tl.where(is_rotated, x * c - y * s, first),
        tl.where(is_rotated, y * c + x * s, second),
    )
    is_query = is_there & (heads < NUM_HEADS)
    destination = query + (token * NUM_HEADS + heads) * HEAD_DIM + at
    tl.store(destination, first.to(query.dtype.element_ty), mask=is_query)
    tl.store(destination + HALF, second.to(query.dtype.element_ty), mask=is_query)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        is_kept = is_there & (heads >= NUM_HEADS)
        # Key heads, then value heads: the same order as in a block.
        planes = (heads - NUM_HEADS) * BLOCK_SIZE * ROW_DIM
        offset = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * ROW_DIM + planes
        stored = kv_layer + offset + at
        if ROW_DIM > HEAD_DIM:
            IS_FP8: tl.constexpr = kv_layer.dtype.element_ty == tl.uint8
            is_infinite = is_no_number(first) | is_no_number(second)
            size = tl.maximum(tl.abs(first), tl.abs(second))
            largest = tl.max(tl.where(is_there & ~is_infinite, size, 0.0), axis=1, keep_dims=True)
            num_bad = tl.sum((is_there & is_infinite).to(tl.int32), axis=1, keep_dims=True)
            scale = scale_of(largest, num_bad == 0, IS_FP8)
            row = kv_scales + (offset + HEAD_DIM) // 4
            tl.store(row, scale, mask=(heads >= NUM_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS))
            tl.store(stored, codes_of(first, scale, IS_FP8), mask=is_kept)
            tl.store(stored + HALF, codes_of(second, scale, IS_FP8), mask=is_kept)
        else:
            tl.store(stored, first.to(kv_layer.dtype.element_ty), mask=is_kept)
            tl.store(stored + HALF, second.to(kv_layer.dtype.element_ty), mask=is_kept)


@triton.jit(do_not_specialize=("num_tokens",))
def take_sampled_tokens(
    token_ids,  # [num_tokens] int64; -1 - i becomes the i-th of `sampled`
    sampled,  # int32; negative if no token could be chosen
    num_tokens,
    BLOCK: tl.constexpr,
):
    """One program: some tokens. Where none could be chosen, the row computes what nobody uses."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + at, mask=at < num_tokens, other=0)
    taken = tl.load(sampled + (-1 - ids), mask=ids < 0, other=0)
    tl.store(token_ids + at, tl.maximum(taken, 0).to(tl.int64), mask=ids < 0)


@triton.jit
def spread_table_rows(
    tables,  # [num_rows, width] int32
    width,  # pointer to the number of columns
    context_lens,  # [num_rows] int32
    out,  # [num_rows, out_stride] int32
    out_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the blocks of one row's context, and no others."""
    row = tl.program_id(0).to(tl.int64)
    stride = tl.load(width)
    num_blocks = tl.cdiv(tl.load(context_lens + row), BLOCK_SIZE)
    for first in range(0, num_blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        block_ids = tl.load(tables + row * stride + at, mask=at < num_blocks)
        tl.store(out + row * out_stride + at, block_ids, mask=at < num_blocks)
