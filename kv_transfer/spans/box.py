"""Which KV is to be moved, and where it is: boxes of KV, and runs of blocks in a pool."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kv import KvLayout

_MAX_ROWS: Final = 256  # that are remembered: every pull asks for the same ones


class KvBox(msgspec.Struct, frozen=True):
    """Which KV of a request: tokens x layers x KV heads of the model, each a half-open range."""

    begin: int  # token
    end: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def is_empty(self) -> bool:
        """Whether the box contains nothing."""
        return (
            self.begin >= self.end
            or self.first_layer >= self.end_layer
            or self.first_head >= self.end_head
        )

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return self.end_head - self.first_head

    def num_bytes(self, layout: KvLayout) -> int:
        """Bytes of the box, in any layout of the same model."""
        num_rows = (self.end_layer - self.first_layer) * self.num_heads
        return num_rows * layout.head_bytes * (self.end - self.begin)


def whole_box(layout: KvLayout, begin: int, end: int) -> KvBox:
    """The box of everything that a pool of this layout has of tokens [begin, end)."""
    layers, heads = layout.layers, layout.heads
    return KvBox(begin, end, layers.start, layers.stop, heads.start, heads.stop)


class Rows(msgspec.Struct, frozen=True, eq=False):
    """The rows of a box in a block of some layout: one for each layer, plane and head.

    A row holds what one head has of the block's tokens, one slot after the other.
    """

    offsets: NDArray[np.int64]  # in the block: [num_layers, num_planes, num_heads]
    slot_bytes: NDArray[np.int64]  # of one token: [num_planes, 1]

    @classmethod
    def of(cls, layout: KvLayout, box: KvBox) -> Rows:
        """The rows of a box that the layout has."""
        layers = range(box.first_layer, box.end_layer)
        return _rows(layout, layers, range(box.first_head, box.end_head))


@lru_cache(_MAX_ROWS)
def _rows(layout: KvLayout, layers: range, heads: range) -> Rows:
    slot_bytes = np.array([[plane.row_bytes] for plane in layout.planes], dtype=np.int64)
    row_bytes = slot_bytes * layout.block_size
    begins = np.cumsum(row_bytes, axis=0) - row_bytes  # of the planes, if there were one head
    own_heads = np.arange(heads.start, heads.stop, dtype=np.int64) - layout.heads.start
    own_layers = np.arange(layers.start, layers.stop, dtype=np.int64) - layout.layers.start
    in_layer = begins * len(layout.heads) + own_heads * row_bytes
    return Rows(own_layers[:, None, None] * layout.layer_bytes + in_layer, slot_bytes)


class BlockRun(msgspec.Struct, frozen=True, eq=False):
    """Consecutive blocks of one request in one pool.

    Block `block_ids[i]` holds the tokens from `(first_block + i) * layout.block_size` on.
    """

    layout: KvLayout
    block_ids: NDArray[np.int64]
    first_block: int = 0

    def check_covers(self, box: KvBox) -> None:
        """Check that the blocks hold the whole box. Raises ValueError."""
        layout = self.layout
        layers, heads = layout.layers, layout.heads
        first = self.first_block * layout.block_size
        last = first + len(self.block_ids) * layout.block_size
        if box.begin < first or box.end > last:
            raise ValueError(
                f"tokens {box.begin}..{box.end} are not all in blocks for {first}..{last}"
            )
        if box.first_layer < layers.start or box.end_layer > layers.stop:
            raise ValueError(
                f"layers {box.first_layer}..{box.end_layer} are not all in "
                f"{layers.start}..{layers.stop}"
            )
        if box.first_head < heads.start or box.end_head > heads.stop:
            raise ValueError(
                f"KV heads {box.first_head}..{box.end_head} are not all in "
                f"{heads.start}..{heads.stop}"
            )
