"""The types of GGUF tensors: a row of TYPES each, with how blocks become float32.

A row of a matrix is a whole number of blocks. Results are equal, bit for bit, to those of the
`gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.model_files.gguf.codes import CODED, CodedType

# 255 is a NaN, and with these two the largest codes are infinities.
_MAX_POWER: Final = 252

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of tensors."""

    name: str
    elements: int  # of a block
    bytes: int  # of a block
    plain: Callable[[Bytes], Floats] | None = None  # decodes [blocks, bytes]; None: it is coded
    scales: tuple[int, ...] = ()  # places of a block's float16 scales and minimums
    power: int | None = None  # place of its scale, if that is an exponent of 2

    @property
    def coded(self) -> CodedType | None:
        """How it codes weights, if it does."""
        return CODED.get(self.name)

    def num_bytes(self, num_elements: int) -> int:
        """Size of so many elements, which are whole blocks."""
        return num_elements // self.elements * self.bytes

    def blocks(self, data: memoryview, num_columns: int, rows: range, columns: range) -> Bytes:
        """Return the blocks that a part of a matrix is in: [rows, blocks, bytes].

        Args:
            data: of the whole matrix.
            num_columns: of the whole matrix.
            rows: of the part.
            columns: likewise.
        """
        row_bytes = self.num_bytes(num_columns)
        stored = np.frombuffer(data, np.uint8, len(rows) * row_bytes, rows.start * row_bytes)
        first, last = columns.start // self.elements, -(-columns.stop // self.elements)
        return stored.reshape(len(rows), -1, self.bytes)[:, first:last]

    @property
    def has_scales(self) -> bool:
        """Whether a scale of a block may be one that no weight can have."""
        return bool(self.scales) or self.power is not None

    def are_bad(self, blocks: Bytes) -> NDArray[np.bool_]:
        """Which blocks have a scale that is not finite: [..., bytes] -> [...]."""
        if self.power is not None:
            return blocks[..., self.power] > _MAX_POWER
        # A float16 is an infinity or a NaN if all bits of its exponent are set.
        exponents = blocks[..., [place + 1 for place in self.scales]] & 0x7C
        found: NDArray[np.bool_] = (exponents == 0x7C).any(axis=-1)
        return found

    def decode(self, blocks: Bytes) -> Floats:
        """Return what blocks stand for: [blocks, bytes] -> [blocks, elements]."""
        if self.coded is not None:
            return self.coded.read(blocks, len(blocks)).decoded()
        assert self.plain is not None, self.name
        return self.plain(blocks)

    def decode_rows(self, blocks: Bytes, columns: range) -> Floats:
        """Decode columns of rows of blocks, which begin with the block of the first column."""
        flat = np.ascontiguousarray(blocks).reshape(-1, self.bytes)
        start = columns.start % self.elements
        return self.decode(flat).reshape(len(blocks), -1)[:, start : start + len(columns)]


def _float32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _float16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bfloat16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


TYPES: Final[dict[int, BlockType]] = {
    0: BlockType("F32", 1, 4, _float32),
    1: BlockType("F16", 1, 2, _float16),
    2: BlockType("Q4_0", 32, 18, scales=(0,)),
    3: BlockType("Q4_1", 32, 20, scales=(0, 2)),
    6: BlockType("Q5_0", 32, 22, scales=(0,)),
    7: BlockType("Q5_1", 32, 24, scales=(0, 2)),
    8: BlockType("Q8_0", 32, 34, scales=(0,)),
    10: BlockType("Q2_K", 256, 84, scales=(80, 82)),
    11: BlockType("Q3_K", 256, 110, scales=(108,)),
    12: BlockType("Q4_K", 256, 144, scales=(0, 2)),
    13: BlockType("Q5_K", 256, 176, scales=(0, 2)),
    14: BlockType("Q6_K", 256, 210, scales=(208,)),
    20: BlockType("IQ4_NL", 32, 18, scales=(0,)),
    23: BlockType("IQ4_XS", 256, 136, scales=(0,)),
    30: BlockType("BF16", 1, 2, _bfloat16),
    39: BlockType("MXFP4", 32, 17, power=0),
}
