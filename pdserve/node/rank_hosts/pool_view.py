"""A KV pool as arrays of numbers that are only moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdserve.kv import KvLayout
from pdserve.node.rank_hosts.lacking import Ids

Elements: TypeAlias = NDArray[Any]  # of as many bytes as those of the pool
_ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_PIECE_BYTES = 16 << 20


class PoolView:
    """Blocks and single tokens of the layers from one on."""

    def __init__(self, data: NDArray[np.uint8], layout: KvLayout, first_layer: int = 0) -> None:
        """`data`: uint8[num_blocks, block_bytes] in the pool's own memory."""
        elements = data.reshape(-1).view(_ELEMENTS[layout.dtype.itemsize])
        # [num_blocks, num_layers, ...], as `KvLayout.block_shape`
        self._blocks = elements.reshape(-1, *layout.block_shape)[:, first_layer:]

    def blocks(self, ids: Ids) -> Elements:
        """A copy: [num_ids, num_layers, ...], the rest as `KvLayout.block_shape`."""
        return self._blocks[ids]

    def set_blocks(self, ids: Ids, blocks: Elements) -> None:
        """Write what `blocks` has returned."""
        self._blocks[ids] = blocks

    def tokens(self, ids: Ids, places: Ids) -> Elements:
        """A copy: [num_tokens, num_layers, ...], the rest as a block's without its tokens."""
        return self._blocks[ids, :, :, :, places]

    def set_tokens(self, ids: Ids, places: Ids, tokens: Elements) -> None:
        """Write what `tokens` has returned."""
        self._blocks[ids, :, :, :, places] = tokens

    def empty_blocks(self, num_ids: int) -> Elements:
        """Memory for what `blocks` returns."""
        return np.empty((num_ids, *self._blocks.shape[1:]), self._blocks.dtype)

    def few_at_once(self, ids: Ids) -> Iterator[Ids]:
        """The same ids in pieces whose blocks may well be copied."""
        most = max(1, _PIECE_BYTES // self._blocks[0].nbytes)
        for first in range(0, len(ids), most):
            yield ids[first : first + most]

    def empty_tokens(self, num_tokens: int) -> Elements:
        """Memory for what `tokens` returns."""
        _, num_layers, two, heads, _, row = self._blocks.shape
        return np.empty((num_tokens, num_layers, two, heads, row), self._blocks.dtype)
