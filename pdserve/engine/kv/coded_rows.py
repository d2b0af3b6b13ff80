"""Rows of codes, in plain torch: what the kernels store and read, bit for bit.

A row is head_dim codes of 8 bits and then their scale, so a number is code x scale. The largest
number of a row gets the largest code. Nothing but the row decides what is stored of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

SCALE_BYTES: Final = torch.float32.itemsize
_LEAST_SCALE: Final = torch.finfo(torch.float32).tiny  # of smaller ones too few bits are left
_LEAST_ROUNDED: Final = 2.0**-100  # of rounded rows: no product with a code is denormal

# Element type of the pool |-> the largest code, and how to round to codes.
_CODES: Final[dict[torch.dtype, tuple[float, Callable[[Tensor], Tensor]]]] = {
    torch.int8: (127.0, lambda x: x.round().to(torch.int8)),
    torch.uint8: (448.0, lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8)),
}


def is_coded(dtype: torch.dtype) -> bool:
    """Whether a pool of such elements has codes."""
    return dtype in _CODES


def as_scales(pool: Tensor) -> Tensor:
    """Return a pool of codes as float32, of which every last number of a row is its scale.

    Raises:
        ValueError: rows are no whole numbers of float32.
    """
    if pool.shape[-1] % SCALE_BYTES or not pool.is_contiguous():
        raise ValueError(f"rows of {pool.shape[-1]} bytes, or not contiguous: scales need 4")
    return pool.view(torch.float32)


def encoded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of codes, [..., head_dim + bytes of a scale], of numbers [..., head_dim].

    Where one is not finite, the scale is NaN, and the codes are zero.
    """
    largest, rounded = _CODES[dtype]
    numbers = numbers.float()
    scales = numbers.abs().amax(-1, keepdim=True) / largest
    scales = torch.where(scales < _LEAST_SCALE, 0.0, scales)
    scales = torch.where(numbers.isfinite().all(-1, keepdim=True), scales, torch.nan)
    codes = rounded(torch.where(scales > 0, numbers / scales, 0.0))
    as_bytes = scales.flatten().view(dtype).reshape(*codes.shape[:-1], SCALE_BYTES)
    return torch.cat([codes, as_bytes], dim=-1)


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers [..., head_dim], rounded to codes times a scale, in their own dtype.

    Scales have 16 bits, so that products with codes are exact. What has been rounded stays as it is
    when it is rounded again: so it can be sent as codes, without loss. Where one is not finite, all
    are NaN.
    """
    largest, to_codes = _CODES[dtype]
    wide = numbers.float()
    scales = wide.abs().amax(-1, keepdim=True) / largest
    bits = scales.view(torch.int32)
    short = ((bits + 0x7F + (bits >> 8 & 1)) & ~0xFF).view(torch.float32)
    scales = torch.where(scales < _LEAST_ROUNDED, 0.0, short)
    scales = torch.where(wide.isfinite().all(-1, keepdim=True), scales, torch.nan)
    codes = to_codes(torch.where(scales > 0, wide / scales, 0.0))
    if dtype is torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return (codes.float() * scales).to(numbers.dtype)


def decoded(rows: Tensor) -> Tensor:
    """Return the numbers, float32 [..., head_dim], of rows; those of other pools as float32."""
    if not is_coded(rows.dtype):
        return rows.float()
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    if rows.dtype is torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float() * scales.contiguous().view(torch.float32)
