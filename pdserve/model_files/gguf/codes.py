"""The quantised types of GGUF tensors: a row of CODED each, with how blocks become codes.

What these stand for is equal, bit for bit, to what the `gguf` package decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.model_files.coding import Codes, Coding, ScaleType

Bytes = NDArray[np.uint8]  # [blocks, bytes of one]
Halves = NDArray[np.float16]  # [blocks, 1]


@dataclass(frozen=True, slots=True)
class CodedType:
    """How one type codes its weights."""

    coding: Coding
    codes: Callable[[Bytes], Bytes]  # [blocks, elements of one]
    scales: Callable[[Bytes], NDArray[Any]]  # [blocks, groups]
    minimums: Callable[[Bytes], NDArray[Any]] | None = None
    super_scales: Callable[[Bytes], Halves] | None = None
    super_minimums: Callable[[Bytes], Halves] | None = None

    def read(self, blocks: Bytes, num_rows: int) -> Codes:
        """Return the codes of rows, which are as many blocks each."""

        def rows(part: Callable[[Bytes], NDArray[Any]] | None) -> NDArray[Any] | None:
            return None if part is None else part(blocks).reshape(num_rows, -1)

        return Codes(
            self.coding,
            self.codes(blocks).reshape(num_rows, -1),
            self.scales(blocks).reshape(num_rows, -1),
            rows(self.minimums),
            rows(self.super_scales),
            rows(self.super_minimums),
        )


def _half(start: int, sign: int = 0) -> Callable[[Bytes], Halves]:
    """Reads the float16 at a place of each block; with a sign of 0x8000, its negative."""

    def read(blocks: Bytes) -> Halves:
        bits = np.ascontiguousarray(blocks[:, start : start + 2]).view(np.uint16)
        return (bits ^ np.uint16(sign)).view(np.float16)

    return read


def _nibbles(packed: Bytes) -> Bytes:
    """The low nibbles of each row of bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fields(packed: Bytes, group: int, bits: int, width: int) -> Bytes:
    """Numbers of `width` bits: of each `group` bytes first the lowest of all, then the next.

    Each begins `bits` above the one before. [blocks, n * group] -> [blocks, n * (8 / bits) * group]
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, group) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(len(packed), -1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The fifth bits of 32 numbers, in 4 bytes: [blocks, 32], each 0 or 16."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


# ---- blocks of 32 --------------------------------------------------------------------------------

_NONLINEAR: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)
_E2M1_TWICE: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
_OF_NONLINEAR: Final = (_NONLINEAR + 128).astype(np.uint8)
_OF_E2M1: Final = (_E2M1_TWICE + 16).astype(np.uint8)


def _powers(blocks: Bytes) -> NDArray[np.float32]:
    # 2^(e - 127), halved, as the table has the values twice; the least two are denormal.
    exponents = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << exponents, (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


# ---- blocks of 256 -------------------------------------------------------------------------------


def _scales_of_8(start: int) -> Callable[[Bytes], NDArray[np.int8]]:
    """Reads eight scales of 6 bits (start 4) or as many minimums (start 8) from 12 bytes at 4."""

    def read(blocks: Bytes) -> NDArray[np.int8]:
        own, rest = blocks[:, start : start + 4], blocks[:, 12:16]
        low = rest & 15 if start == 4 else rest >> 4
        return np.concatenate([own & 63, low | (own >> 2 & 48)], axis=1).view(np.int8)

    return read


def _scales_of_q3_k(blocks: Bytes) -> NDArray[np.int8]:
    packed = blocks[:, 96:108]
    high = _fields(packed[:, 8:], 4, 2, 2)  # [blocks, 16]
    return (_fields(packed[:, :8], 8, 4, 4) | high << np.uint8(4)).astype(np.int8) - np.int8(32)


def _q3_k(blocks: Bytes) -> Bytes:
    thirds = _fields(blocks[:, :32], 32, 1, 1)  # 1: nothing is taken away
    return _fields(blocks[:, 32:96], 32, 2, 2) + np.uint8(4) + (thirds << np.uint8(2))


def _q5_k(blocks: Bytes) -> Bytes:
    fifths = _fields(blocks[:, 16:48], 32, 1, 1) << np.uint8(4)
    return _fields(blocks[:, 48:], 32, 4, 4) | fifths


def _q6_k(blocks: Bytes) -> Bytes:
    high = _fields(blocks[:, 128:192], 32, 2, 2) << np.uint8(4)
    return _fields(blocks[:, :128], 64, 4, 4) | high


def _scales_of_iq4_xs(blocks: Bytes) -> NDArray[np.int8]:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2) & 3
    low = _fields(blocks[:, 4:8], 1, 4, 4)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def _super(bits: int, group: int, zero: int = 0, *, has_minimums: bool = False) -> Coding:
    return Coding(bits, group, zero, ScaleType.TWO_LEVELS, has_minimums)


CODED: Final = {
    "Q4_0": CodedType(Coding(4, 32, 8), lambda b: _nibbles(b[:, 2:]), _half(0)),
    "Q4_1": CodedType(
        Coding(4, 32, has_minimums=True),
        lambda b: _nibbles(b[:, 4:]),
        _half(0),
        _half(2, 0x8000),
    ),
    "Q5_0": CodedType(
        Coding(5, 32, 16), lambda b: _nibbles(b[:, 6:]) | _fifth_bits(b, 2), _half(0)
    ),
    "Q5_1": CodedType(
        Coding(5, 32, has_minimums=True),
        lambda b: _nibbles(b[:, 8:]) | _fifth_bits(b, 4),
        _half(0),
        _half(2, 0x8000),
    ),
    "Q8_0": CodedType(Coding(8, 32, 128), lambda b: b[:, 2:] ^ np.uint8(128), _half(0)),
    "Q2_K": CodedType(
        _super(4, 16, has_minimums=True),
        lambda b: _fields(b[:, 16:80], 32, 2, 2),
        lambda b: (b[:, :16] & 15).view(np.int8),
        lambda b: (b[:, :16] >> 4).view(np.int8),
        _half(80),
        _half(82),
    ),
    "Q3_K": CodedType(_super(4, 16, 8), _q3_k, _scales_of_q3_k, None, _half(108)),
    "Q4_K": CodedType(
        _super(4, 32, has_minimums=True),
        lambda b: _fields(b[:, 16:], 32, 4, 4),
        _scales_of_8(4),
        _scales_of_8(8),
        _half(0),
        _half(2),
    ),
    "Q5_K": CodedType(
        _super(5, 32, has_minimums=True),
        _q5_k,
        _scales_of_8(4),
        _scales_of_8(8),
        _half(0),
        _half(2),
    ),
    "Q6_K": CodedType(
        _super(6, 16, 32), _q6_k, lambda b: b[:, 192:208].view(np.int8), None, _half(208)
    ),
    "IQ4_NL": CodedType(Coding(8, 32, 128), lambda b: _OF_NONLINEAR[_nibbles(b[:, 2:])], _half(0)),
    "IQ4_XS": CodedType(
        _super(8, 32, 128),
        lambda b: _OF_NONLINEAR[_fields(b[:, 8:], 16, 4, 4)],
        _scales_of_iq4_xs,
        None,
        _half(0),
    ),
    "MXFP4": CodedType(
        Coding(5, 32, 16, ScaleType.FLOAT32), lambda b: _OF_E2M1[_nibbles(b[:, 1:])], _powers
    ),
}
