"""Triton kernels of products with quantised weights. They check nothing: see `products.py`.

Numbers are made as csrc/linear/kernels/integers/integers.h says, operation by operation and without
fused ones, so products of codes have the bits that they have on CPUs. In 16 bits, an integer of x
is two bytes here, its planes: tensor cores multiply both, and all sums are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.cuda.attention.code_kernels import e4m3_numbers

_MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: leaves no room for fractions
_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_LARGEST: tl.constexpr = tl.constexpr(32639)  # of 16 bits; 257 times 127
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
_LEAST_SCALED: tl.constexpr = tl.constexpr(2.0**-100)
_CHUNK: tl.constexpr = tl.constexpr(64)


@triton.jit
def quantise_rows(
    x,  # [num_rows, num_in]
    planes,  # [2, num_rows, padded] int8: of q, the upper bytes, and the lower ones as signed
    scales,  # [num_rows] float32: x is about q times this
    sums,  # [num_rows, padded / SUMMED] int32: of q
    of_blocks,  # [num_rows, num_blocks] float32: the largest magnitudes, only for this kernel
    num_in,
    num_blocks,  # of 32 inputs, the last of which may not be full
    padded,  # inputs
    plane_bytes,
    SUMMED: tl.constexpr,  # inputs: 16 or 32
    BLOCKS: tl.constexpr,  # at a time
):
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    x += row * num_in
    of_blocks += row * num_blocks
    planes += row * padded
    inputs = tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    of_row = tl.zeros((BLOCKS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = block[:, None, None] * 32 + inputs
        values = tl.load(x + at, mask=at < num_in, other=0.0).to(tl.float32)
        # Magnitudes have the order of their bits, with infinity and NaN at the end.
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        of_block = tl.max(tl.max(bits, axis=2), axis=1)
        of_row = tl.maximum(of_row, of_block)
        tl.store(of_blocks + block, of_block.to(tl.float32, bitcast=True), mask=block < num_blocks)
    largest_bits = tl.max(of_row, axis=0)
    tl.debug_barrier()  # other threads have stored what comes now
    total = 0.0
    for first in range(0, num_blocks, 16):
        for i in tl.static_range(16):
            total += tl.load(of_blocks + first + i, mask=first + i < num_blocks, other=0.0)
    # Blocks with more have all 16 bits.
    limit = 1.5 * tl.div_rn(total, num_blocks.to(tl.float32))
    largest = largest_bits.to(tl.float32, bitcast=True)
    is_finite = largest_bits < _INFINITY
    is_scaled = is_finite & (largest >= _LEAST_SCALED)
    divisor = tl.where(is_scaled, largest, 1.0)
    scale = tl.where(is_scaled, tl.div_rn(divisor, _LARGEST * 1.0), 0.0)
    tl.store(scales + row, tl.where(is_finite, scale, float("nan")))
    factor = tl.where(is_scaled, tl.div_rn(_LARGEST * 1.0, divisor), 0.0)
    multiplier_factor = tl.where(is_scaled, tl.div_rn(257.0, divisor), 0.0)
    for first in range(0, padded // 32, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = block[:, None, None] * 32 + inputs
        values = tl.load(x + at, mask=at < num_in, other=0.0).to(tl.float32)
        values = tl.where(is_finite, values, 0.0)
        halves = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
        of_halves = halves.to(tl.float32, bitcast=True)
        is_wide = tl.max(of_halves, axis=1) > limit
        # The least with which no input has more than 127.
        exact = of_halves * multiplier_factor
        least = exact.to(tl.int32)
        least += (least.to(tl.float32) < exact).to(tl.int32)
        least = tl.minimum(least, 257)
        multiplier = tl.where(is_wide[:, None] | (least < 1), 1, least)
        factors = tl.div_rn(factor, multiplier.to(tl.float32))
        nearest = values * factors[:, :, None] + _MAGIC
        q = (nearest.to(tl.int32, bitcast=True) - _MAGIC_BITS) * multiplier[:, :, None]
        upper = (q + 128) >> 8
        is_there = at < padded
        tl.store(planes + at, upper.to(tl.int8), mask=is_there)
        tl.store(planes + plane_bytes + at, (q - (upper << 8)).to(tl.int8), mask=is_there)
        added = tl.sum(q, axis=2)
        if SUMMED == 16:
            half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
            tl.store(sums + row * (padded // 16) + half, added, mask=half < padded // 16)
        else:
            added = tl.sum(added, axis=1)
            tl.store(sums + row * (padded // 32) + block, added, mask=block < padded // 32)


@triton.jit
def numbers_of(numbers, supers, group, num_out, columns, mask, SHARE: tl.constexpr):
    """Return the scales or minimums of a group in float32: [outputs].

    `SHARE`: so many groups share one of `supers`; 0: there are none.
    """
    found = tl.load(numbers + group * num_out + columns, mask=mask, other=0).to(tl.float32)
    if SHARE > 0:
        of_supers = tl.load(supers + group // SHARE * num_out + columns, mask=mask, other=0.0)
        found = of_supers.to(tl.float32) * found
    return found


@triton.jit
def products_of_codes(
    planes,
    scales_of_x,
    sums,
    codes,
    scales,
    minimums,
    super_scales,
    super_minimums,
    rows,  # [BLOCK_M] int64, of x
    is_row,
    columns,  # [BLOCK_N] int64
    is_column,
    num_out,
    held,
    padded,
    plane_bytes,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SHARE: tl.constexpr,
    IS_NESTED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the products of some rows and columns: [BLOCK_M, BLOCK_N] float32. See `multiply`."""
    # Inputs that are multiplied at once: of one byte's codes, or of one scale.
    WIDTH: tl.constexpr = 32 if BITS == 4 or GROUP < 64 else 64
    SUMMED: tl.constexpr = 16 if GROUP == 16 else 32
    END: tl.constexpr = GROUP if GROUP <= CHUNKS * _CHUNK else CHUNKS * _CHUNK
    inputs = tl.arange(0, WIDTH)
    wide_out = num_out.to(tl.int64)
    packed_at = columns[None, :] * 32 + inputs[:, None] % 32
    x_at = rows[:, None] * padded + inputs[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    upper = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    lower = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for first in range(0, padded // _CHUNK, CHUNKS):
        for c in tl.static_range(CHUNKS):
            chunk = first + c
            start = chunk * wide_out
            is_there = is_column[None, :] & (chunk * _CHUNK + inputs < held)[:, None]
            if BITS == 4:
                packed = tl.load(codes + start * 32 + packed_at, mask=is_there, other=0)
            for part in tl.static_range(_CHUNK // WIDTH):
                k = chunk * _CHUNK + part * WIDTH
                x_upper = tl.load(planes + x_at + k, mask=is_row[:, None], other=0)
                x_lower = tl.load(planes + plane_bytes + x_at + k, mask=is_row[:, None], other=0)
                if BITS == 4:
                    weights = packed & 15 if part == 0 else packed >> 4
                    if IS_NESTED:
                        group = k // 32 * num_out
                        own = tl.load(scales + group + columns, mask=is_column, other=0).to(
                            tl.int32
                        )
                        off = tl.load(minimums + group + columns, mask=is_column, other=0).to(
                            tl.int32
                        )
                        wide = weights.to(tl.int32) * own[None, :] - off[None, :]
                        weights = wide.to(tl.int8)
                    else:
                        weights = weights.to(tl.int8) - ZERO
                else:
                    at = (start + columns[None, :]) * _CHUNK + part * WIDTH + inputs[:, None]
                    weights = tl.load(codes + at, mask=is_there, other=0)
                for half in tl.static_range(2 if GROUP == 16 else 1):
                    some_upper, some_lower = x_upper, x_lower
                    if GROUP == 16:
                        is_half = (inputs // 16 == half)[None, :]
                        some_upper = tl.where(is_half, x_upper, 0)
                        some_lower = tl.where(is_half, x_lower, 0)
                    upper = tl.dot(some_upper, weights, upper, out_dtype=tl.int32)
                    lower = tl.dot(some_lower, weights, lower, out_dtype=tl.int32)
                    for block in tl.static_range(WIDTH // 32):
                        if HAS_MINIMUMS or (BITS == 8 and ZERO != 128):
                            number = (k + block * 32) // SUMMED + half
                            of_x = tl.load(
                                sums + rows * (padded // SUMMED) + number, mask=is_row, other=0
                            )
                            if BITS == 8 and ZERO != 128:  # bytes are less by 128
                                lower += (of_x * (128 - ZERO))[:, None]
                            if HAS_MINIMUMS:
                                low = numbers_of(
                                    minimums,
                                    super_minimums,
                                    (k + block * 32) // GROUP + half,
                                    num_out,
                                    columns,
                                    is_column,
                                    SHARE,
                                )
                                total = total - low[None, :] * of_x.to(tl.float32)[:, None]
                    # Of a group that ends here. What is longer than a turn ends with some turn.
                    if (c * _CHUNK + (part + 1) * WIDTH) % END == 0 or GROUP == 16:  # noqa: SIM102
                        if GROUP <= END or (chunk + 1) * _CHUNK % GROUP == 0:
                            made = ((upper << 8) + lower).to(tl.float32)
                            if HAS_SCALES:
                                own_scales = numbers_of(
                                    super_scales if IS_NESTED else scales,
                                    super_scales,
                                    k // GROUP + half,
                                    num_out,
                                    columns,
                                    is_column,
                                    SHARE,
                                )
                                made = made * own_scales[None, :]
                            total = total + made
                            upper = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
                            lower = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    of_rows = tl.load(scales_of_x + rows, mask=is_row, other=0.0)
    return total * of_rows[:, None]


@triton.jit
def products_of_floats(
    x,
    codes,
    rows,
    is_row,
    columns,
    is_column,
    num_in,
    num_out,
    held,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As products_of_codes, of weights of e4m3, which float16 and bfloat16 have all."""
    inputs = tl.arange(0, _CHUNK)
    wide_out = num_out.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for chunk in range(0, held // _CHUNK):
        k = chunk * _CHUNK + inputs
        some_x = tl.load(
            x + rows[:, None] * num_in + k[None, :],
            mask=is_row[:, None] & (k < num_in)[None, :],
            other=0.0,
        )
        at = (chunk * wide_out + columns[None, :]) * _CHUNK + inputs[:, None]
        bits = tl.load(codes + at, mask=is_column[None, :], other=0)
        weights = e4m3_numbers(bits).to(x.dtype.element_ty)
        total = tl.dot(some_x, weights, total, input_precision="ieee")
    return total


@triton.jit
def products(
    x,
    scales_of_x,
    sums,
    codes,
    scales,
    minimums,
    super_scales,
    super_minimums,
    bias,
    rows,
    is_row,
    columns,
    is_column,
    num_in,
    num_out,
    held,
    padded,
    plane_bytes,
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
    """Return what is to be stored, of weights of any kind: [BLOCK_M, BLOCK_N] float32."""
    if IS_FLOAT:
        y = products_of_floats(
            x, codes, rows, is_row, columns, is_column, num_in, num_out, held, BLOCK_M, BLOCK_N
        )
    else:
        y = products_of_codes(
            x,
            scales_of_x,
            sums,
            codes,
            scales,
            minimums,
            super_scales,
            super_minimums,
            rows,
            is_row,
            columns,
            is_column,
            num_out,
            held,
            padded,
            plane_bytes,
            BITS,
            GROUP,
            ZERO,
            HAS_SCALES,
            SHARE,
            IS_NESTED,
            HAS_MINIMUMS,
            CHUNKS,
            BLOCK_M,
            BLOCK_N,
        )
    if not HAS_SCALES:  # of groups; an output has one
        y = y * tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        y = y + tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def multiply(
    x,  # planes, or [num_rows, num_in] if weights are floats
    scales_of_x,  # [num_rows] float32
    sums,  # [num_rows, padded / 32 or, if a group has 16 inputs, / 16] int32
    codes,  # [chunks, num_out, 8 * BITS]
    scales,  # [groups, num_out]; of floats, and without groups: [num_out] float32
    minimums,  # likewise
    super_scales,  # [supers, num_out] float16
    super_minimums,
    bias,  # [num_out]
    out,  # [num_rows, num_out]
    num_rows,
    num_in,
    num_out,
    held,  # inputs that codes have
    padded,  # inputs that planes have: whole turns, and whole groups
    plane_bytes,
    IS_FLOAT: tl.constexpr,
    BITS: tl.constexpr,  # of a code: 4 or 8
    GROUP: tl.constexpr,  # inputs that share a scale
    ZERO: tl.constexpr,  # taken away from each code
    HAS_SCALES: tl.constexpr,  # of groups; else an output has one
    SHARE: tl.constexpr,  # groups that share a number; 0: there are none
    IS_NESTED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,  # of 64 inputs, a turn: whole groups, or a whole part of one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: some outputs of some rows. What is not there is not read; see linear.py."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_out
    y = products(
        x,
        scales_of_x,
        sums,
        codes,
        scales,
        minimums,
        super_scales,
        super_minimums,
        bias,
        rows,
        is_row,
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
        out + rows[:, None] * num_out + columns[None, :],
        y.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
