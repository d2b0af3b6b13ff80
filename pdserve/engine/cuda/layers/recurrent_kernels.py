"""Triton kernels of layers with a state (`models/recurrent.py`). They check nothing: recurrent.py.

A program goes through the rows of one request, so a row's bits depend on no other request, and on
no division of a prompt: what it goes on with is float32, in registers as in the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(table, at, there, BLOCK_FLOATS: tl.constexpr):
    """Where in the pool numbers of a state are: blocks that follow each other in a table."""
    block = tl.load(table + at // BLOCK_FLOATS, mask=there, other=0).to(tl.int64)
    return block * BLOCK_FLOATS + at % BLOCK_FLOATS


@triton.jit
def _number(pool, table, at, BLOCK_FLOATS: tl.constexpr):
    """One number of a state."""
    block = tl.load(table + at // BLOCK_FLOATS).to(tl.int64)
    return tl.load(pool + block * BLOCK_FLOATS + at % BLOCK_FLOATS)


@triton.jit
def convolve_rows(
    rows,  # [num_rows, width]: of each group its channels and gates; then others
    taps,  # [num_groups, kernel, channels] float32, oldest first
    pool,  # float32, in blocks
    tables,  # [num_requests, 3, num_blocks] int32: a request's own, before the step, and kept
    num_blocks,
    query_start,  # [num_requests + 1] int32
    context_lens,  # [num_requests] int32
    kept_after,  # [num_requests] int32; 0: nothing is kept
    first_number,  # of the layer in a state
    mixed,  # [num_rows, num_groups, channels] float32
    width,
    GROUP_STATE: tl.constexpr,  # numbers of a group
    CHANNELS: tl.constexpr,
    GATES: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: some channels of one group of one request. The last inputs are kept."""
    request, group = tl.program_id(0), tl.program_id(1)
    num_groups = tl.num_programs(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = at < CHANNELS
    first, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    # Channels of inputs before the step: none of a request that begins.
    num_before = tl.where(tl.load(context_lens + request) > end - first, CHANNELS, 0)
    kept_end = first + tl.load(kept_after + request)
    own = tables + request * 3 * num_blocks
    state = first_number + group * GROUP_STATE
    source = rows + group * (CHANNELS + GATES) + at
    for index in range(end - first):
        row = first + index
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            input_row = row + tap - (KERNEL - 1)
            in_step = at < tl.where(input_row >= first, CHANNELS, 0)
            x = tl.load(source + input_row.to(tl.int64) * width, mask=in_step, other=0.0)
            before = at < tl.where(input_row < first, num_before, 0)
            number = state + (input_row - first + KERNEL - 1) * CHANNELS + at
            place = _places(own + num_blocks, number, before, BLOCK_FLOATS)
            x = x.to(tl.float32) + tl.load(pool + place, mask=before, other=0.0)
            weight = tl.load(taps + (group * KERNEL + tap) * CHANNELS + at, mask=there, other=0.0)
            total += x * weight
        out = mixed + (row.to(tl.int64) * num_groups + group) * CHANNELS + at
        tl.store(out, total / (1.0 + tl.exp(-total)), mask=there)
    # Its own state may be what it goes on with: no place is read behind one that was written.
    for which in tl.static_range(2):
        last = kept_end if which == 0 else end
        table = own + (2 - 2 * which) * num_blocks
        is_kept = at < tl.where(last > first, CHANNELS, 0)
        for tap in tl.static_range(KERNEL - 1):
            input_row = last + tap - (KERNEL - 1)
            in_step = is_kept & (at < tl.where(input_row >= first, CHANNELS, 0))
            x = tl.load(source + input_row.to(tl.int64) * width, mask=in_step, other=0.0)
            before = is_kept & (at < tl.where(input_row < first, num_before, 0))
            number = state + (input_row - first + KERNEL - 1) * CHANNELS + at
            place = _places(own + num_blocks, number, before, BLOCK_FLOATS)
            x = x.to(tl.float32) + tl.load(pool + place, mask=before, other=0.0)
            place = _places(table, state + tap * CHANNELS + at, is_kept, BLOCK_FLOATS)
            tl.store(pool + place, x, mask=is_kept)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)): with s = e / (2 + e), log(1 + e) is twice s + s³/3 + s⁵/5 + ..."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    p = 1.0 / 15.0
    p = p * square + 1.0 / 13.0
    p = p * square + 1.0 / 11.0
    p = p * square + 1.0 / 9.0
    p = p * square + 1.0 / 7.0
    p = p * square + 1.0 / 5.0
    p = p * square + 1.0 / 3.0
    p = p * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def go_on_with_states(
    rows,  # [num_rows, width], as of convolve_rows; then betas and decays, group by group
    mixed,  # [num_rows, num_groups, channels] float32: query, key and values
    decay,  # [num_groups, group_size] float32, a logarithm
    decay_bias,  # likewise
    pool,
    tables,
    num_blocks,
    query_start,
    context_lens,
    kept_after,
    first_number,
    made,  # [num_rows, num_groups, group_size, value_dim] float32
    width,
    query_scale,
    GROUP_STATE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INPUTS: tl.constexpr,  # numbers of a group before its matrices
    CHUNK: tl.constexpr,
    BLOCK_FLOATS: tl.constexpr,
    KEYS: tl.constexpr,  # at least KEY_DIM
    VALUES: tl.constexpr,  # columns of a program
):
    """One program: some columns of one value head's matrix, of one request."""
    request, head = tl.program_id(0), tl.program_id(1) % GROUP_SIZE
    group = tl.program_id(1) // GROUP_SIZE
    num_groups = tl.num_programs(1) // GROUP_SIZE
    CHANNELS: tl.constexpr = 2 * KEY_DIM + GROUP_SIZE * VALUE_DIM
    GATES: tl.constexpr = GROUP_SIZE * VALUE_DIM
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    first, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    num_before = tl.load(context_lens + request) - (end - first)
    kept_end = first + tl.load(kept_after + request)
    own = tables + request * 3 * num_blocks
    before, kept = own + num_blocks, own + 2 * num_blocks
    state = first_number + group * GROUP_STATE
    number = state + INPUTS + (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    is_there = is_key[:, None] & is_value[None, :]
    # What it goes on with: a matrix, and what the tokens of a chunk add to it.
    was_begun = keys < tl.where(num_before > 0, KEY_DIM, 0)
    there = was_begun[:, None] & is_value[None, :]
    states = tl.load(pool + _places(before, number, there, BLOCK_FLOATS), mask=there, other=0.0)
    num_beside = num_before % CHUNK
    if num_beside > 0:
        chunk = state + INPUTS + GROUP_SIZE * KEY_DIM * VALUE_DIM
        deltas = chunk + CHUNK * KEY_DIM + head * CHUNK * VALUE_DIM
        shares = chunk + CHUNK * (KEY_DIM + GROUP_SIZE * VALUE_DIM) + head * (CHUNK + 1)
        states *= _number(pool, before, shares + CHUNK, BLOCK_FLOATS)
        for token in range(num_beside):
            share = _number(pool, before, shares + token, BLOCK_FLOATS)
            place = _places(before, chunk + token * KEY_DIM + keys, is_key, BLOCK_FLOATS)
            key = tl.load(pool + place, mask=is_key, other=0.0)
            place = _places(before, deltas + token * VALUE_DIM + values, is_value, BLOCK_FLOATS)
            delta = tl.load(pool + place, mask=is_value, other=0.0)
            states += (share * key)[:, None] * delta[None, :]
    rate = tl.exp(tl.load(decay + group * GROUP_SIZE + head))
    bias = tl.load(decay_bias + group * GROUP_SIZE + head)
    for index in range(end - first):
        row = (first + index).to(tl.int64)
        of_row = mixed + (row * num_groups + group) * CHANNELS
        query = tl.load(of_row + keys, mask=is_key, other=0.0)
        key = tl.load(of_row + KEY_DIM + keys, mask=is_key, other=0.0)
        at = of_row + 2 * KEY_DIM + head * VALUE_DIM + values
        value = tl.load(at, mask=is_value, other=0.0)
        query *= query_scale / tl.sqrt_rn(tl.sum(query * query, axis=0) + 1e-6)
        key *= 1.0 / tl.sqrt_rn(tl.sum(key * key, axis=0) + 1e-6)
        of_betas = num_groups * (CHANNELS + GATES) + 2 * group * GROUP_SIZE + head
        of_betas = rows + row * width + of_betas
        beta = 1.0 / (1.0 + tl.exp(-tl.load(of_betas).to(tl.float32)))
        step = tl.load(of_betas + GROUP_SIZE).to(tl.float32) + bias
        states *= tl.exp(-rate * _softplus(step))
        known = tl.sum(states * key[:, None], axis=0)
        states += key[:, None] * (beta * (value - known))[None, :]
        at = ((row * num_groups + group) * GROUP_SIZE + head) * VALUE_DIM + values
        tl.store(made + at, tl.sum(states * query[:, None], axis=0), mask=is_value)
        if first + index + 1 == kept_end:
            place = _places(kept, number, is_there, BLOCK_FLOATS)
            tl.store(pool + place, states, mask=is_there)
    tl.store(pool + _places(own, number, is_there, BLOCK_FLOATS), states, mask=is_there)


@triton.jit
def leave_nothing_beside(
    pool,
    tables,
    num_blocks,
    kept_after,
    first_number,
    GROUP_STATE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BESIDE: tl.constexpr,  # numbers of a group before what is beside its matrices
    CHUNK: tl.constexpr,
    BLOCK_FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one group of one request's own state, or of the one that is kept.

    Matrices have taken in all tokens: what is beside them counts nothing, and they count in full.
    All that may be multiplied by 0 has to be a number.
    """
    request, group, is_kept = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    COUNT: tl.constexpr = CHUNK * (KEY_DIM + GROUP_SIZE * VALUE_DIM) + GROUP_SIZE * (CHUNK + 1)
    table = tables + (request * 3 + 2 * is_kept) * num_blocks
    is_written = (is_kept == 0) | (tl.load(kept_after + request) > 0)
    count = tl.where(is_written, COUNT, 0)
    state = first_number + group * GROUP_STATE + BESIDE
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        share = at - CHUNK * (KEY_DIM + GROUP_SIZE * VALUE_DIM)
        is_whole = (share >= 0) & (share % (CHUNK + 1) == CHUNK)
        place = _places(table, state + at, at < count, BLOCK_FLOATS)
        tl.store(pool + place, tl.where(is_whole, 1.0, 0.0), mask=at < count)


@triton.jit
def norm_and_weigh(
    rows,  # as of go_on_with_states
    made,
    value_norm,  # [value_dim] float32
    out,  # [num_rows, num_groups, group_size, value_dim]
    width,
    norm_eps,
    CHANNELS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # at least VALUE_DIM
):
    """One program: what one head has made of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = head // GROUP_SIZE
    values = tl.arange(0, VALUES)
    there = values < VALUE_DIM
    at = (row * tl.num_programs(1) + head) * VALUE_DIM + values
    x = tl.load(made + at, mask=there, other=0.0)
    weight = tl.load(value_norm + values, mask=there, other=0.0)
    mean_square = tl.sum(x * x, axis=0) / VALUE_DIM
    x *= weight / tl.sqrt_rn(mean_square + norm_eps)
    gates = rows + row * width + (group + 1) * CHANNELS + head * VALUE_DIM + values
    gate = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, (x * gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty), mask=there)
