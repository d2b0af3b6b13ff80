"""Triton kernels of latent attention. They check nothing: see latent.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_write_rows(
    queries,  # [num_tokens, num_heads, NOPE + 2 * HALF]
    rows,  # [num_tokens, RANK + 2 * HALF]
    norm,  # [RANK]
    cos,  # [num_tokens, HALF] float32
    sin,
    slots,  # [num_tokens] int64
    out,  # [num_tokens, num_heads, RANK + 2 * HALF], whose last part is written
    kv_layer,  # pointer to block 0's rows of this layer
    block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,  # at least RANK
    BLOCK: tl.constexpr,  # at least HALF
):
    """One program: the row of one token (the first), or some heads of its query."""
    token = tl.program_id(0).to(tl.int64)
    ROW: tl.constexpr = RANK + 2 * HALF
    at = tl.arange(0, BLOCK)
    c = tl.load(cos + token * HALF + at, mask=at < HALF, other=0.0)
    s = tl.load(sin + token * HALF + at, mask=at < HALF, other=0.0)
    if tl.program_id(1) > 0:
        heads = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        is_there = (heads < NUM_HEADS) & (at < HALF)[None, :]
        source = queries + (token * NUM_HEADS + heads) * (NOPE + 2 * HALF) + NOPE + at[None, :]
        first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=is_there, other=0.0).to(tl.float32)
        x = first * c[None, :] - second * s[None, :]
        y = second * c[None, :] + first * s[None, :]
        to = out + (token * NUM_HEADS + heads) * ROW + RANK + at[None, :]
        tl.store(to, x.to(out.dtype.element_ty), mask=is_there)
        tl.store(to + HALF, y.to(out.dtype.element_ty), mask=is_there)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    row = kv_layer + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * ROW
    dims = tl.arange(0, BLOCK_RANK)
    latent = tl.load(rows + token * ROW + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(latent * latent, axis=0) / RANK + eps)
    weight = tl.load(norm + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    normed = latent * factor * weight
    tl.store(row + dims, normed.to(kv_layer.dtype.element_ty), mask=dims < RANK)
    source = rows + token * ROW + RANK + at
    first = tl.load(source, mask=at < HALF, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    x = first * c - second * s
    y = second * c + first * s
    tl.store(row + RANK + at, x.to(kv_layer.dtype.element_ty), mask=at < HALF)
    tl.store(row + RANK + HALF + at, y.to(kv_layer.dtype.element_ty), mask=at < HALF)
