"""Triton kernels of paged attention. They check nothing: see triton_attention.py.

A row's result does not depend on the rest of the batch: key tiles begin at multiples of BLOCK_N,
and tiles that are fully masked for a row leave it unchanged, bit for bit. The keys of requests with
one row (decode steps) are split over several programs, so that one long context keeps the whole GPU
busy; the split depends only on the length of the context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.cuda.attention.code_kernels import numbers_of_codes

# Triton would otherwise recompile a kernel when one of these is 1, or the first multiple of 16.
_OFTEN_OTHERS = ("num_requests", "table_stride", "window", "used_splits")


@triton.jit
def _attend_keys(
    queries,  # pointers to the first numbers of the rows' queries: [BLOCK_M]
    is_lane,  # [BLOCK_M]: whether there is such a row
    positions,  # [BLOCK_M], of the rows in their request
    peak,  # [BLOCK_M] float32: what the softmax begins with; sum of weights likewise
    total,
    keys,  # pointer to this head's keys in block 0; values likewise
    values,
    key_scales,  # the same memory as float32: a row of codes ends with its scale
    value_scales,
    block_table,  # pointer to the request's block ids
    first_key,  # a multiple of BLOCK_N
    end_key,
    block_stride,
    scale_log2,
    cap_log2,
    window,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Online softmax over the keys [first_key, end_key): weighted values, peak, sum of weights.

    With VALUE_DIM < HEAD_DIM the first numbers of a key are its value, and are read once for both.
    With ROW_DIM > HEAD_DIM the pool has codes: a key's scale is on its scores, a value's on its
    weight.
    """
    HAS_CODES: tl.constexpr = ROW_DIM > HEAD_DIM
    IS_FP8: tl.constexpr = keys.dtype.element_ty == tl.uint8
    dims = tl.arange(0, BLOCK_D)
    rest = VALUE_DIM + tl.arange(0, BLOCK_REST)
    is_query = is_lane[:, None] & (dims < VALUE_DIM)[None, :]
    query = tl.load(queries[:, None] + dims[None, :], mask=is_query, other=0.0)
    if VALUE_DIM < HEAD_DIM:
        is_rest = is_lane[:, None] & (rest < HEAD_DIM)[None, :]
        query_rest = tl.load(queries[:, None] + rest[None, :], mask=is_rest, other=0.0)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(first_key, end_key, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        is_key = at < end_key
        block_ids = tl.load(block_table + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        rows = block_ids * block_stride + (at % BLOCK_SIZE) * ROW_DIM
        offsets = rows[:, None] + dims[None, :]
        # Keys outside the range are never read: that memory may hold anything, including NaN.
        is_there = is_key[:, None] & (dims < VALUE_DIM)[None, :]
        key = tl.load(keys + offsets, mask=is_there, other=0)  # [BLOCK_N, BLOCK_D]
        if HAS_CODES:
            key = numbers_of_codes(key, IS_FP8).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if VALUE_DIM < HEAD_DIM:
            is_more = is_key[:, None] & (rest < HEAD_DIM)[None, :]
            more = tl.load(keys + rows[:, None] + rest[None, :], mask=is_more, other=0.0)
            scores = tl.dot(query_rest, tl.trans(more), scores, input_precision="ieee")
        scores *= scale_log2
        if HAS_CODES:
            of_keys = tl.load(key_scales + (rows + HEAD_DIM) // 4, mask=is_key, other=0.0)
            scores *= of_keys[None, :]
        if HAS_CAP:  # cap * tanh(score / cap); far beyond the cap, exp2 would be infinite
            ratio = scores / cap_log2 * 2.8853900817779268
            ratio = tl.minimum(ratio, 126.0, propagate_nan=tl.PropagateNan.ALL)
            scores = cap_log2 - 2.0 * cap_log2 / (tl.exp2(ratio) + 1.0)
        # One comparison for each score: as an unsigned number, what is ahead is very far. No row of
        # the range is at its end or behind, so `is_key` need not be asked, too.
        distance = (positions[:, None] - at[None, :]).to(tl.uint32, bitcast=True)
        scores = tl.where(distance < window.to(tl.uint32), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # for fully masked rows
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        value = key
        if VALUE_DIM == HEAD_DIM:
            value = tl.load(values + offsets, mask=is_there, other=0)
        total = total * decay + tl.sum(weights, axis=1)
        if HAS_CODES:
            numbers = numbers_of_codes(value, IS_FP8)
            of_values = tl.load(value_scales + (rows + HEAD_DIM) // 4, mask=is_key, other=0.0)
            if query.dtype == tl.float16:  # such small weights have too few bits in it
                value = (numbers * of_values[:, None]).to(query.dtype)
            else:
                value = numbers.to(query.dtype)
                weights *= of_values[None, :]
        out = out * decay[:, None]
        out = tl.dot(weights.to(value.dtype), value, out, input_precision="ieee")
        peak = new_peak
    return out, peak, total


@triton.jit
def _request_of_tile(query_start, tile, num_requests, BLOCK_Q: tl.constexpr):
    """Return the last request whose first tile is not after `tile`.

    Request r's tiles begin at query_start[r] // BLOCK_Q + r, which leaves room for all of them.
    """
    low = 0
    high = num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=_OFTEN_OTHERS)
def attend_chunks(
    query,  # [num_tokens, num_heads, head_dim], strides in elements
    kv_layer,  # pointer to block 0's keys of this layer
    kv_scales,  # the same memory as float32, if it has codes
    out,  # [num_tokens, num_heads, VALUE_DIM], contiguous
    query_start,
    context_lens,
    block_tables,
    num_requests,
    token_stride,
    head_stride,
    table_stride,
    block_stride,
    scale_log2,
    cap_log2,
    window,
    sinks,  # [num_heads] float32
    HAS_CAP: tl.constexpr,  # else cap_log2 is not read
    HAS_SINKS: tl.constexpr,  # else sinks is not read
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    TILE_HEADS: tl.constexpr,  # as many of them as one program has: a power of two
    HEAD_DIM: tl.constexpr,
    ROW_DIM: tl.constexpr,  # elements of a row of the pool
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # tokens of a tile
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least VALUE_DIM
    BLOCK_REST: tl.constexpr,  # at least HEAD_DIM - VALUE_DIM
):
    """One program: a tile of a request's rows, for heads of a KV head. Skips single rows.

    A request's last tiles have the most keys. They start first, of all heads, so that at the end
    there are short ones.
    """
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // (NUM_KV_HEADS * HEAD_TILES)
    kv_head = tl.program_id(0) // HEAD_TILES % NUM_KV_HEADS
    request = _request_of_tile(query_start, tile, num_requests, BLOCK_Q)
    start = tl.load(query_start + request)
    num_rows = tl.load(query_start + request + 1) - start
    first_row = (tile - (start // BLOCK_Q + request)) * BLOCK_Q
    if num_rows == 1 or first_row >= num_rows:
        return
    context_len = tl.load(context_lens + request)
    before = context_len - num_rows

    BLOCK_M: tl.constexpr = BLOCK_Q * TILE_HEADS
    lanes = tl.arange(0, BLOCK_M)
    rows = first_row + lanes // TILE_HEADS
    of_group = tl.program_id(0) % HEAD_TILES * TILE_HEADS + lanes % TILE_HEADS
    heads = kv_head * GROUP + of_group
    is_lane = (rows < num_rows) & (of_group < GROUP)
    tokens = (start + rows).to(tl.int64)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + heads, mask=is_lane, other=0.0) * 1.4426950408889634
        total += 1.0

    first_position = before + first_row
    first_key = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    end_key = tl.minimum(first_position + BLOCK_Q, context_len)
    keys = kv_layer + kv_head * BLOCK_SIZE * ROW_DIM
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * ROW_DIM
    key_scales = kv_scales + kv_head * BLOCK_SIZE * ROW_DIM // 4
    value_scales = key_scales + NUM_KV_HEADS * BLOCK_SIZE * ROW_DIM // 4
    weighted, _, total = _attend_keys(
        query + tokens * token_stride + heads * head_stride,
        is_lane,
        before + rows,
        peak,
        total,
        keys,
        values,
        key_scales,
        value_scales,
        block_tables + request.to(tl.int64) * table_stride,
        first_key,
        end_key,
        block_stride,
        scale_log2,
        cap_log2,
        window,
        HAS_CAP,
        HEAD_DIM,
        ROW_DIM,
        VALUE_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_REST,
    )
    dims = tl.arange(0, BLOCK_D)
    is_there = is_lane[:, None] & (dims < VALUE_DIM)[None, :]
    out_offsets = (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * VALUE_DIM + dims[None, :]
    result = weighted / tl.where(is_lane, total, 1.0)[:, None]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _split_keys(
    context_len,
    window,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where the last row's keys begin, and how many keys one split has."""
    first_key = tl.maximum(context_len - window, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(context_len - first_key, NUM_SPLITS)
    return first_key, tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, MIN_SPLIT_KEYS)


@triton.jit(do_not_specialize=_OFTEN_OTHERS)
def attend_single_rows(
    query,  # [num_tokens, num_heads, head_dim], strides in elements
    kv_layer,
    kv_scales,
    partial_out,  # [num_requests, num_heads, NUM_SPLITS, VALUE_DIM] float32
    partial_sums,  # [num_requests, num_heads, NUM_SPLITS, 2] float32: peak, sum of weights
    query_start,
    context_lens,
    block_tables,
    used_splits,  # at most NUM_SPLITS: more would not find any keys
    token_stride,
    head_stride,
    table_stride,
    block_stride,
    scale_log2,
    cap_log2,
    window,
    HAS_CAP: tl.constexpr,  # else cap_log2 is not read
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # heads of a KV head that one program has
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
):
    """One program: one split of the keys of a request with one row, for heads of a KV head.

    The splits of a request are side by side: so programs that find no keys run beside others that
    do, and not all of them at the end, when nobody reads memory.
    """
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(0) % used_splits
    tile = tl.program_id(0) // used_splits % (NUM_KV_HEADS * HEAD_TILES)
    kv_head = tile // HEAD_TILES
    request = tl.program_id(0) // used_splits // (NUM_KV_HEADS * HEAD_TILES)
    start = tl.load(query_start + request)
    context_len = tl.load(context_lens + request)
    first_key, num_keys = _split_keys(context_len, window, NUM_SPLITS, MIN_SPLIT_KEYS, BLOCK_N)
    first_key += split * num_keys
    if tl.load(query_start + request + 1) - start != 1 or first_key >= context_len:
        return
    of_group = tile % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    heads, is_lane = kv_head * GROUP + of_group, of_group < GROUP
    keys = kv_layer + kv_head * BLOCK_SIZE * ROW_DIM
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * ROW_DIM
    key_scales = kv_scales + kv_head * BLOCK_SIZE * ROW_DIM // 4
    value_scales = key_scales + NUM_KV_HEADS * BLOCK_SIZE * ROW_DIM // 4
    weighted, peak, total = _attend_keys(
        query + start.to(tl.int64) * token_stride + heads * head_stride,
        is_lane,
        tl.zeros([BLOCK_M], tl.int32) + (context_len - 1),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        keys,
        values,
        key_scales,
        value_scales,
        block_tables + request.to(tl.int64) * table_stride,
        first_key,
        tl.minimum(first_key + num_keys, context_len),
        block_stride,
        scale_log2,
        cap_log2,
        window,
        HAS_CAP,
        HEAD_DIM,
        ROW_DIM,
        VALUE_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_REST,
    )
    partials = (request.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * NUM_SPLITS + split
    dims = tl.arange(0, BLOCK_D)
    is_there = is_lane[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(partial_out + partials[:, None] * VALUE_DIM + dims[None, :], weighted, mask=is_there)
    tl.store(partial_sums + partials * 2, peak, mask=is_lane)
    tl.store(partial_sums + partials * 2 + 1, total, mask=is_lane)


@triton.jit
def merge_splits(
    partial_out,
    partial_sums,
    out,  # [num_tokens, num_heads, VALUE_DIM], contiguous
    query_start,
    context_lens,
    window,
    sinks,  # [num_heads] float32
    HAS_SINKS: tl.constexpr,  # else sinks is not read
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,  # as of attend_single_rows
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
):
    """One program: one head of a request with one row. Without any context the result is 0."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_start + request)
    if tl.load(query_start + request + 1) - start != 1:
        return
    context_len = tl.load(context_lens + request)
    first_key, num_keys = _split_keys(context_len, window, NUM_SPLITS, MIN_SPLIT_KEYS, BLOCK_N)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    is_split = first_key + splits * num_keys < context_len
    partials = (request.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + splits
    peaks = tl.load(partial_sums + partials * 2, mask=is_split, other=float("-inf"))
    totals = tl.load(partial_sums + partials * 2 + 1, mask=is_split, other=0.0)
    is_there = is_split[:, None] & (dims < VALUE_DIM)[None, :]
    offsets = partials[:, None] * VALUE_DIM + dims[None, :]
    weighted = tl.load(partial_out + offsets, mask=is_there, other=0.0)
    peak = tl.max(peaks, axis=0)
    sink = peak
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(totals * weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    result = tl.sum(weighted * weights[:, None], axis=0)
    result = tl.where(context_len > 0, result / tl.where(context_len > 0, total, 1.0), 0.0)
    row = (start.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM
    tl.store(out + row + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
