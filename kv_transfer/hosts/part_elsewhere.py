"""A part of a pool that another host of the node has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.memory import MemoryKind


class PartElsewhere:
    """Implements KvPool. There is nothing of it here but its size."""

    def __init__(self, kind: MemoryKind, num_blocks: int, block_bytes: int) -> None:
        self.kind: MemoryKind = kind
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    @property
    def generations(self) -> NDArray[np.uint64]:
        """Those of the other parts: uint64[num_blocks]."""
        raise AssertionError("whoever asks for generations asks a part that is here")

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make all tickets for these blocks stale; call it *before* they are reused.

        Its host is told of it (`ShardedPool.follow_bumps`).
        """

    def close(self) -> None:
        """Nothing to do."""
