"""Which KV is to be moved, and where it is: boxes of KV, and runs of blocks in a pool."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kv_layout import KvLayout


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
        row_bytes = layout.head_dim * layout.dtype.itemsize
        return 2 * num_rows * row_bytes * (self.end - self.begin)


def whole_box(layout: KvLayout, begin: int, end: int) -> KvBox:
    """The box of everything that a pool of this layout has of tokens [begin, end)."""
    layers, heads = (
        (layout.first_layer, layout.end_layer),
        (layout.first_kv_head, layout.end_kv_head),
    )
    return KvBox(begin, end, *layers, *heads)


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
        first = self.first_block * layout.block_size
        last = first + len(self.block_ids) * layout.block_size
        if box.begin < first or box.end > last:
            raise ValueError(
                f"tokens {box.begin}..{box.end} are not all in blocks for {first}..{last}"
            )
        if box.first_layer < layout.first_layer or box.end_layer > layout.end_layer:
            raise ValueError(
                f"layers {box.first_layer}..{box.end_layer} are not all in "
                f"{layout.first_layer}..{layout.end_layer}"
            )
        if box.first_head < layout.first_kv_head or box.end_head > layout.end_kv_head:
            raise ValueError(
                f"KV heads {box.first_head}..{box.end_head} are not all in "
                f"{layout.first_kv_head}..{layout.end_kv_head}"
            )
