"""The types of GGUF tensors: a row of TYPES each, with how blocks become float32.

A row of a matrix is a whole number of blocks. Decoding is in float32 and in the order of operations
of the `gguf` package, so its results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]  # [blocks, bytes of one]
Floats = NDArray[np.float32]  # [blocks, elements of one]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of tensors."""

    name: str
    elements: int  # of a block
    bytes: int  # of a block
    decode: Callable[[Bytes], Floats]

    def num_bytes(self, num_elements: int) -> int:
        """Size of so many elements, which are whole blocks."""
        return num_elements // self.elements * self.bytes

    def rows(self, data: memoryview, num_columns: int, rows: range, columns: range) -> Floats:
        """Decode a part of a matrix, reading no other blocks.

        Args:
            data: of the whole matrix.
            num_columns: of the whole matrix.
            rows: to decode, one after the other.
            columns: likewise.
        """
        row_bytes = self.num_bytes(num_columns)
        stored = np.frombuffer(data, np.uint8, len(rows) * row_bytes, rows.start * row_bytes)
        first, last = columns.start // self.elements, -(-columns.stop // self.elements)
        blocks = stored.reshape(len(rows), -1, self.bytes)[:, first:last]
        decoded = self.decode(np.ascontiguousarray(blocks).reshape(-1, self.bytes))
        start = columns.start - first * self.elements
        return decoded.reshape(len(rows), -1)[:, start : start + len(columns)]


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at a place of each block: [blocks, 1] float32."""
    part = np.ascontiguousarray(blocks[:, start : start + 2])
    return part.view(np.float16).astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
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


# ---- plain numbers -------------------------------------------------------------------------------


def _float32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _float16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bfloat16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# ---- blocks of 32 --------------------------------------------------------------------------------


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_halves(blocks[:, 2:]).astype(np.int8) - np.int8(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _halves(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.astype(np.int8) - np.int8(16))


def _q5_1(blocks: Bytes) -> Floats:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


_NONLINEAR: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_E2M1_TWICE: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _NONLINEAR[_halves(blocks[:, 2:])]


def _mxfp4(blocks: Bytes) -> Floats:
    # 2^(e - 127), halved, as the table has the values twice; the least two are denormal.
    exponents = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << exponents, (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32) * _E2M1_TWICE[_halves(blocks[:, 1:])]


# ---- blocks of 256 -------------------------------------------------------------------------------


def _scaled(scales: Any, codes: Any, group: int) -> Floats:
    """Codes [blocks, 256] times a scale for each `group` of them."""
    grouped = codes.reshape(len(codes), -1, group)
    return np.asarray(scales[:, :, None] * grouped, np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    packed = blocks[:, :16]
    scales = _half(blocks, 80) * (packed & 15).astype(np.float32)
    minimums = _half(blocks, 82) * (packed >> 4).astype(np.float32)
    codes = _fields(blocks[:, 16:80], 32, 2, 2).astype(np.float32)
    return (_scaled(scales, codes, 16) - minimums[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    packed, low = blocks[:, 96:108], blocks[:, 96:104]
    high = _fields(packed[:, 8:], 4, 2, 2)  # [blocks, 16]
    scales = (_fields(low, 8, 4, 4) | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    thirds = _fields(blocks[:, :32], 32, 1, 1)  # 1: nothing is taken away
    codes = _fields(blocks[:, 32:96], 32, 2, 2).astype(np.int8)
    codes -= (thirds ^ 1).astype(np.int8) << np.int8(2)
    return _scaled(_half(blocks, 108) * scales, codes.astype(np.float32), 16).reshape(-1, 256)


def _scales_of_8(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minimums of 6 bits in 12 bytes: [blocks, 8] each."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _with_minimums(blocks: Bytes, codes: Bytes) -> Floats:
    scales, minimums = _scales_of_8(blocks[:, 4:16])
    scales, minimums = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    products = _scaled(scales, codes.astype(np.float32), 32)
    return (products - minimums[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _with_minimums(blocks, _fields(blocks[:, 16:], 32, 4, 4))


def _q5_k(blocks: Bytes) -> Floats:
    fifths = _fields(blocks[:, 16:48], 32, 1, 1) << np.uint8(4)
    return _with_minimums(blocks, _fields(blocks[:, 48:], 32, 4, 4) | fifths)


def _q6_k(blocks: Bytes) -> Floats:
    low = _fields(blocks[:, :128], 64, 4, 4)
    high = _fields(blocks[:, 128:192], 32, 2, 2) << np.uint8(4)
    codes = (low | high).astype(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(scales, codes.astype(np.float32), 16).reshape(-1, 256)


def _iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2) & 3
    low = _fields(blocks[:, 4:8], 1, 4, 4)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    values = _NONLINEAR[_fields(blocks[:, 8:], 16, 4, 4)]
    return _scaled(_half(blocks, 0) * scales, values, 32).reshape(-1, 256)


TYPES: Final[dict[int, BlockType]] = {
    0: BlockType("F32", 1, 4, _float32),
    1: BlockType("F16", 1, 2, _float16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    30: BlockType("BF16", 1, 2, _bfloat16),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
