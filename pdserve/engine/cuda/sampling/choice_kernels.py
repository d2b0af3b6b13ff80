"""The Triton kernel that chooses tokens. It checks nothing: see launches.py.

One program has one row, and goes over its logits a few times. It computes what csrc/sampling and
the torch reference (sampling/weights.py, sampling/filters.py) compute, to the bit: weights are
rounded alike, so it must be compiled without fused multiply-adds, and sums of weights are exact in
float64, in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.cuda.sampling.search_kernels import threshold

NUM_PARAMS = tl.constexpr(7)  # columns of 8 bytes: sampling/sampler.py

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)  # the smallest and the largest normal float32
_MOST_SCALE = tl.constexpr(3.4028234663852886e38)
_UNIT = tl.constexpr(2.0**-34)  # weights are multiples of it
_UNITS_BELOW = tl.constexpr(2.0**-11)  # float32 numbers from here to 1 are multiples anyway
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and subtracted, it rounds to an integer
_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def choose_tokens(
    logits,  # [num_rows, vocab_size] float32, changed already
    row_stride,
    rows,  # [num_draws] int32, of the logits
    # Not `params`: what Triton makes to launch it has a variable of that name.
    draw_params,  # [num_draws, NUM_PARAMS] int64, the bits of sampling/sampler.py
    candidates,  # [num_draws, at least vocab_size and BLOCK] int32, working memory
    candidates_stride,
    token_ids,  # [num_draws] int32, out; -1 if a logit is NaN or +inf, -2 if all are -inf
    vocab_size,
    HAS_ROWS: tl.constexpr,  # false: of each draw its own
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """One program: one draw. The likeliest token, the lowest id among equals, or a random one."""
    draw = tl.program_id(0).to(tl.int64)
    index = draw
    if HAS_ROWS:
        index = tl.load(rows + draw).to(tl.int64)
    row = logits + index * row_stride
    own = draw_params + draw * NUM_PARAMS
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)  # of each lane
    best_at = tl.zeros([BLOCK], tl.int32)
    is_nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        at = first + lanes
        x = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
        is_nan |= (x != x).to(tl.int32)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_at = tl.where(is_better, at, best_at)
    peak = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == peak, best_at, vocab_size), axis=0)
    is_finite = (peak > float("-inf")) & (peak < float("inf"))
    if (tl.max(is_nan, axis=0) == 0) & is_finite:
        if _number(own, 0) > 0.0:
            mine = candidates + draw * candidates_stride
            token_id = _random(row, vocab_size, peak, best, own, mine, BLOCK, SEARCH_BLOCK)
    else:
        token_id = tl.maximum(tl.max(is_nan, axis=0), (peak > 0.0).to(tl.int32)) - 2
    tl.store(token_ids + draw, token_id)


@triton.jit
def _number(own, column):
    """Return one of a draw's parameters that are float64."""
    return tl.load(own + column).to(tl.float64, bitcast=True)


@triton.jit
def _random(
    row,
    vocab_size,
    peak,
    best,  # [BLOCK] the largest logit of each lane
    own,
    candidates,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """Return a random token by temperature, min-p, top-k, top-p and the inverse CDF."""
    scale = tl.minimum(tl.maximum(_LOG2_E / _number(own, 0), _LEAST_SCALE), _MOST_SCALE)
    scale = scale.to(tl.float32)
    floor = _floor(row, vocab_size, peak, scale, best, own, candidates, BLOCK, SEARCH_BLOCK)
    total = _mass(row, vocab_size, peak, scale, floor, BLOCK)
    target = _uniform(tl.load(own + 4), tl.load(own + 5)) * total  # less than the total
    lanes = tl.arange(0, BLOCK)
    first = 0
    below = target * 0.0
    weights = _weights(row, first + lanes, vocab_size, peak, scale, floor)
    here = tl.sum(weights, axis=0)
    # The bound only guards against a kernel that never ends.
    while (below + here <= target) & (first + BLOCK < vocab_size):
        below += here
        first += BLOCK
        weights = _weights(row, first + lanes, vocab_size, peak, scale, floor)
        here = tl.sum(weights, axis=0)
    is_above = below + tl.cumsum(weights, axis=0) > target
    return tl.min(tl.where(is_above, first + lanes, vocab_size - 1), axis=0)


@triton.jit
def _floor(
    row,
    vocab_size,
    peak,
    scale,
    best,
    own,
    candidates,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """Return the smallest weight that passes the filters; equals are kept or dropped together.

    The weights that may be it are collected first: those from a bound on, which is below it.
    """
    top_p, top_k = _number(own, 1), tl.load(own + 3)
    floor = _number(own, 2).to(tl.float32)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if has_top_k | (top_p < 1.0):
        least = floor
        mass = top_p * 0.0
        if has_top_k:
            if top_k <= BLOCK:  # as many lanes have such a weight, or a larger one
                weights = _weigh(best, peak, scale)
                tl.store(candidates + tl.arange(0, BLOCK), weights.to(tl.int32, bitcast=True))
                tl.debug_barrier()
                bound = threshold(candidates, BLOCK, top_k.to(tl.float64), False, SEARCH_BLOCK)
                least = tl.maximum(least, _as_weight(bound))
                tl.debug_barrier()
        else:  # what is below the bound weighs less in total than what may be dropped
            mass = _mass(row, vocab_size, peak, scale, floor, BLOCK)
            expendable = 0.99 * (mass - tl.maximum(top_p * mass, _UNIT)) / vocab_size
            least = tl.maximum(least, expendable.to(tl.float32))
        count = _collect(row, vocab_size, peak, scale, least, candidates, BLOCK)
        tl.debug_barrier()
        if has_top_k:
            kth = threshold(candidates, count, top_k.to(tl.float64), False, SEARCH_BLOCK)
            floor = tl.maximum(floor, _as_weight(kth))
            mass = _mass_of(candidates, count, floor, SEARCH_BLOCK)
        if top_p < 1.0:
            wanted = tl.maximum(top_p * mass, _UNIT)
            nucleus = threshold(candidates, count, wanted, True, SEARCH_BLOCK)
            floor = tl.maximum(floor, _as_weight(nucleus))
    return floor


@triton.jit
def _weigh(logits, peak, scale):
    """Return the weights of logits: sampling/weights.py, operation by operation."""
    x = tl.maximum((logits - peak) * scale, -126.0)
    exponent = (x + _ROUNDER) - _ROUNDER
    fraction = x - exponent
    power = fraction * 1.535336188319500e-4 + 1.339887440266574e-3
    power = power * fraction + 9.618437357674640e-3
    power = power * fraction + 5.550332471162809e-2
    power = power * fraction + 2.402264791363012e-1
    power = power * fraction + 6.931472028550421e-1
    power = power * fraction + 1.0
    weight = power * ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(weight < _UNITS_BELOW, (weight + _UNITS_BELOW) - _UNITS_BELOW, weight)


@triton.jit
def _as_weight(key):
    """Return the weight with these bits; 0 for the lowest key, below which nothing was found."""
    return tl.maximum(key, 0).to(tl.float32, bitcast=True)


@triton.jit
def _weights(row, at, vocab_size, peak, scale, floor):
    """Return the weights at some places, in float64; 0 below the floor and outside of the row."""
    x = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
    weights = _weigh(x, peak, scale)
    return tl.where(weights >= floor, weights, 0.0).to(tl.float64)


@triton.jit
def _mass(row, vocab_size, peak, scale, floor, BLOCK: tl.constexpr):
    """Return the sum of all weights from the floor up."""
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        sums += _weights(row, first + lanes, vocab_size, peak, scale, floor)
    return tl.sum(sums, axis=0)


@triton.jit
def _collect(row, vocab_size, peak, scale, least, candidates, BLOCK: tl.constexpr):
    """Write the weights above 0 from `least` up, as their bits; return how many there are."""
    lanes = tl.arange(0, BLOCK)
    count = 0
    for first in range(0, vocab_size, BLOCK):
        at = first + lanes
        x = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
        weights = _weigh(x, peak, scale)
        is_kept = ((weights >= least) & (weights > 0.0)).to(tl.int32)
        places = candidates + count + tl.cumsum(is_kept, axis=0) - 1
        tl.store(places, weights.to(tl.int32, bitcast=True), mask=is_kept != 0)
        count += tl.sum(is_kept, axis=0)
    return count


@triton.jit
def _mass_of(candidates, count, floor, BLOCK: tl.constexpr):
    """Return the sum of the candidates from the floor up."""
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        keys = tl.load(candidates + at, mask=at < count, other=0)
        weights = keys.to(tl.float32, bitcast=True)
        sums += tl.where(weights >= floor, weights, 0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def _uniform(seed, position):
    """Return the number in [0, 1) of a seed and a position: sampling/uniform.py."""
    key, counter = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    k0, k1 = key & _WORD, key >> 32
    c0, c1 = counter & _WORD, counter >> 32
    c2, c3 = k0 & 0, k0 & 0
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32) ^ c1 ^ k0, (product0 >> 32) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return (((c0 << 32) | c1) >> 12).to(tl.float64) * 2.0**-52
