"""Parts of Triton kernels: codes of 8 bits, as pools and weights have them (kv/coded_rows.py)."""

from __future__ import annotations

import triton
import triton.language as tl

_MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: leaves no room for fractions
_LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def e4m3_numbers(codes):
    """Return uint8 codes of e4m3 as float32. As bits of float16, they are 256 times too small."""
    bits = codes.to(tl.int16)
    halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(tl.float16, bitcast=True)
    return halves.to(tl.float32) * 256.0


@triton.jit
def numbers_of_codes(codes, IS_FP8: tl.constexpr):
    """Return float32 numbers of int8 codes, or of uint8 ones that are e4m3."""
    return e4m3_numbers(codes) if IS_FP8 else codes.to(tl.float32)


@triton.jit
def is_no_number(numbers):
    """Whether each is an infinity or a NaN."""
    return (numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000


@triton.jit
def _rounded(numbers):
    """The nearest integers of small numbers, ties to even."""
    return (numbers + _MAGIC) - _MAGIC


@triton.jit
def codes_of(numbers, scale, IS_FP8: tl.constexpr):
    """Return the codes of float32 numbers, whose scale makes the largest of them the largest code.

    With a scale that is not above 0, all are zero.
    """
    ratios = tl.div_rn(numbers, tl.where(scale > 0.0, scale, 1.0))
    ratios = tl.where(scale > 0.0, ratios, 0.0)
    if IS_FP8:
        size = tl.abs(ratios)
        bits = size.to(tl.int32, bitcast=True)
        code = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
        least = _rounded(size * 512.0).to(tl.int32)  # below the least exponent
        code = tl.where(size < 0.015625, least, code)
        codes = (code | tl.where(ratios < 0.0, 128, 0)).to(tl.uint8)
    else:
        codes = _rounded(ratios).to(tl.int8)
    return codes


@triton.jit
def scale_of(largest, is_finite, IS_FP8: tl.constexpr):
    """Return the scale of rows whose largest magnitude this is: NaN if one is not finite."""
    scale = tl.div_rn(largest, 448.0 if IS_FP8 else 127.0)
    scale = tl.where(scale < _LEAST_SCALE, 0.0, scale)
    return tl.where(is_finite, scale, float("nan"))
