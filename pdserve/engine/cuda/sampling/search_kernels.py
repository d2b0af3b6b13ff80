"""The search among many numbers for the threshold that keeps enough of them, without sorting."""

from __future__ import annotations

import triton
import triton.language as tl

_DIGITS = tl.constexpr(16)  # of `threshold`: what it tries at a time
_NUM_LEVELS = tl.constexpr(8)
_HIGHEST_DIGIT = tl.constexpr(1 << 28)
LOWEST_KEY = tl.constexpr(-(1 << 31))


@triton.jit
def threshold(keys, count, wanted, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key from which on the keys amount to `wanted`; the lowest if none is.

    A key amounts to 1, or to the weight whose bits it is. The result is found four bits at a time,
    from the highest: of 16 possible digits, the largest that leaves enough.
    """
    lanes = tl.arange(0, BLOCK)
    digits = tl.arange(0, _DIGITS)
    found = tl.full([_DIGITS], LOWEST_KEY, tl.int32)
    step = tl.full([_DIGITS], _HIGHEST_DIGIT, tl.int32)
    for _ in range(_NUM_LEVELS):
        bounds = found + digits * step
        sums = tl.zeros([BLOCK, _DIGITS], tl.float64)
        for first in range(0, count, BLOCK):
            at = first + lanes
            is_there = at < count
            key = tl.load(keys + at, mask=is_there, other=0)
            if BY_WEIGHT:
                amounts = key.to(tl.float32, bitcast=True).to(tl.float64)
            else:
                amounts = tl.full([BLOCK], 1.0, tl.float64)
            is_from = is_there[:, None] & (key[:, None] >= bounds[None, :])
            sums += tl.where(is_from, amounts[:, None], 0.0)
        is_enough = tl.sum(sums, axis=0) >= wanted
        found += tl.max(tl.where(is_enough, digits, 0), axis=0) * step
        step = step >> 4
    return tl.max(found, axis=0)
