"""Triton kernels that change logits before a token is chosen. They check nothing: launches.py."""

from __future__ import annotations

import triton
import triton.language as tl

BIAS = tl.constexpr(0)  # inputs.py: EditKind
FORBID = tl.constexpr(2)
REPETITION = tl.constexpr(3)


@triton.jit(do_not_specialize=("num_words",))
def mask_rows(
    logits,  # [num_rows, vocab_size] float32
    row_stride,
    rows,  # [num_draws] int32, of the logits
    masks,  # [num_draws] int32, which mask; -1: none
    words,  # [num_masks, num_words] int32, bit i % 32 of word i / 32: token i
    num_words,
    changed,  # [num_draws, vocab_size] float32, out
    vocab_size,
    HAS_MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a part of one draw's logits, copied; -inf where the mask forbids a token."""
    draw = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < vocab_size
    row = tl.load(rows + draw).to(tl.int64) * row_stride
    x = tl.load(logits + row + at, mask=is_there, other=0.0)
    if HAS_MASKS:
        mask = tl.load(masks + draw).to(tl.int64)
        if mask >= 0:
            bits = tl.load(words + mask * num_words + at // 32, mask=is_there, other=0)
            x = tl.where(((bits >> (at % 32)) & 1) != 0, x, float("-inf"))
    tl.store(changed + draw * vocab_size + at, x, mask=is_there)


@triton.jit(do_not_specialize=("kind",))
def edit_rows(
    changed,  # [num_draws, vocab_size] float32
    starts,  # [4, num_draws + 1] int32, where the tokens of a kind and draw begin
    token_ids,  # [num_edits] int32; those without a logit are left out
    amounts,  # float32, of the first tokens
    factors,  # [num_draws] float32
    kind,  # an EditKind
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program: the edits of one kind of one draw, none of which has a token twice."""
    draw = tl.program_id(0).to(tl.int64)
    own = starts + kind * (tl.num_programs(0) + 1) + draw
    factor = tl.load(factors + draw)
    end = tl.load(own + 1)
    for first in range(tl.load(own), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        ids = tl.load(token_ids + at, mask=at < end, other=-1)
        is_known = (ids >= 0) & (ids < vocab_size)
        places = changed + draw * vocab_size + ids
        x = tl.load(places, mask=is_known, other=0.0)
        if kind == FORBID:
            x = tl.full([BLOCK], float("-inf"), tl.float32)
        elif kind == REPETITION:
            x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
        elif kind == BIAS:
            x += tl.load(amounts + at, mask=is_known, other=0.0)
        else:
            x -= tl.load(amounts + at, mask=is_known, other=0.0)
        tl.store(places, x, mask=is_known)
