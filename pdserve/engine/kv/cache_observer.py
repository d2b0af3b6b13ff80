"""What is told of changes to a prefix cache."""

from __future__ import annotations

from typing import Protocol


class CacheObserver(Protocol):
    """Follows changes to the prefix cache.

    Called in the middle of a pool operation, so it must not allocate or release blocks.
    """

    def stored(self, block_hash: bytes) -> None:
        """Handle that a block was published under this hash."""
        ...

    def evicted(self, block_hash: bytes) -> None:
        """Handle that the block with this hash was evicted and will be overwritten."""
        ...

    def freed(self, block_hash: bytes) -> None:
        """Handle that the block lost its last reference: still cached, but evictable."""
        ...
