"""The Triton kernel behind log-probabilities. It checks nothing: see launches.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.cuda.sampling.search_kernels import LOWEST_KEY, threshold

SUMMARY = tl.constexpr(3)  # columns: the peak, the sum of exponentials, the chosen token's logit


@triton.jit(do_not_specialize=("width",))
def rank_logits(
    logits,  # [num_rows, vocab_size] float32, as the model computed them
    row_stride,
    rows,  # [num_draws] int32, of the logits
    token_ids,  # [num_draws] int32, chosen
    ranked,  # [num_ranked, 2] int32: which draw, and how many of its likeliest tokens to find
    listed_starts,  # [num_ranked + 1] int32, where the tokens to look up begin
    listed_ids,  # [num_listed] int32
    keys,  # [num_ranked, at least vocab_size and BLOCK] int32, working memory
    key_ids,  # likewise
    keys_stride,
    summaries,  # [num_ranked, SUMMARY] float64, out
    top_ids,  # [num_ranked, width] int32, out: the likeliest, the lowest ids among equals; unsorted
    top_logits,  # [num_ranked, width] float32, out
    width,
    listed_logits,  # [num_listed] float32, out
    vocab_size,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """One program: what the log-probabilities of one draw follow from."""
    index = tl.program_id(0).to(tl.int64)
    draw = tl.load(ranked + index * 2)
    num_top = tl.load(ranked + index * 2 + 1)
    token_id = tl.load(token_ids + draw)
    if token_id < 0:
        return
    row = logits + tl.load(rows + draw).to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        at = first + lanes
        best = tl.maximum(best, tl.load(row + at, mask=at < vocab_size, other=float("-inf")))
    peak = tl.max(best, axis=0)
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        at = first + lanes
        x = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
        sums += tl.exp(x - peak).to(tl.float64)
    summary = summaries + index * SUMMARY
    tl.store(summary, peak.to(tl.float64))
    tl.store(summary + 1, tl.sum(sums, axis=0))
    tl.store(summary + 2, tl.load(row + token_id).to(tl.float64))
    if num_top > 0:
        mine = index * keys_stride
        _rank(
            row,
            vocab_size,
            best,
            num_top,
            keys + mine,
            key_ids + mine,
            top_ids + index * width,
            top_logits + index * width,
            BLOCK,
            SEARCH_BLOCK,
        )
    end = tl.load(listed_starts + index + 1)
    for first in range(tl.load(listed_starts + index), end, SEARCH_BLOCK):
        at = first + tl.arange(0, SEARCH_BLOCK)
        ids = tl.load(listed_ids + at, mask=at < end, other=0)
        tl.store(listed_logits + at, tl.load(row + ids, mask=at < end, other=0.0), mask=at < end)


@triton.jit
def _rank(
    row,
    vocab_size,
    best,  # [BLOCK] the largest logit of each lane
    num_top,
    keys,
    key_ids,
    top_ids,
    top_logits,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """Write the likeliest tokens, the lowest ids among equals."""
    lanes = tl.arange(0, BLOCK)
    wanted = num_top.to(tl.float64)
    least = tl.full([], LOWEST_KEY, tl.int32)
    if num_top <= BLOCK:  # as many lanes have such a logit, or a larger one
        tl.store(keys + lanes, _key(best))
        tl.debug_barrier()
        least = threshold(keys, BLOCK, wanted, False, SEARCH_BLOCK)
        tl.debug_barrier()
    count = 0
    for first in range(0, vocab_size, BLOCK):
        at = first + lanes
        key = _key(tl.load(row + at, mask=at < vocab_size, other=float("-inf")))
        is_kept = ((key >= least) & (at < vocab_size)).to(tl.int32)
        places = count + tl.cumsum(is_kept, axis=0) - 1
        tl.store(keys + places, key, mask=is_kept != 0)
        tl.store(key_ids + places, at, mask=is_kept != 0)
        count += tl.sum(is_kept, axis=0)
    tl.debug_barrier()
    last = threshold(keys, count, wanted, False, SEARCH_BLOCK)
    few = tl.arange(0, SEARCH_BLOCK)
    num_above = tl.zeros([SEARCH_BLOCK], tl.int32)
    for first in range(0, count, SEARCH_BLOCK):
        key = tl.load(keys + first + few, mask=first + few < count, other=LOWEST_KEY)
        num_above += (key > last).to(tl.int32)
    num_equal = num_top - tl.sum(num_above, axis=0)  # to be taken, in the order of their ids
    num_written = 0
    for first in range(0, count, SEARCH_BLOCK):
        is_there = first + few < count
        key = tl.load(keys + first + few, mask=is_there, other=LOWEST_KEY)
        is_equal = ((key == last) & is_there).to(tl.int32)
        is_taken = (is_equal != 0) & (tl.cumsum(is_equal, axis=0) <= num_equal)
        is_taken = (is_taken | ((key > last) & is_there)).to(tl.int32)
        places = num_written + tl.cumsum(is_taken, axis=0) - 1
        ids = tl.load(key_ids + first + few, mask=is_there, other=0)
        tl.store(top_ids + places, ids, mask=is_taken != 0)
        logits = tl.load(row + ids, mask=is_taken != 0, other=0.0)
        tl.store(top_logits + places, logits, mask=is_taken != 0)
        num_written += tl.sum(is_taken, axis=0)
        num_equal -= tl.sum(is_equal, axis=0)


@triton.jit
def _key(logits):
    """Return integers in the order of float32 numbers."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, its equal
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
