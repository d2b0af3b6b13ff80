"""How much of a node's block pool prefixes may take, next to the requests that run here.

A prefix that is fetched, or held for another node, saves time at best; a request that is preempted
for it loses some. So both leave the blocks alone that requests need, or may need at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.scheduler import Queues

MAX_SHARE = 0.5  # of the pool's blocks, being filled at a time


def num_spoken_for(queues: Queues) -> int:
    """Blocks that requests here may need: one to grow for each that runs, all for the next one.

    All of the pool while a policy keeps prompts out, since those wait for blocks too. While the KV
    of a preempted request is fetched, room is kept for nobody else: it is the next one.
    """
    if queues.held_back.is_running:
        return queues.pool.num_blocks
    num_tokens = 0
    if queues.waiting and not queues.preemptions.away:
        num_tokens = (queues.kept_out or queues.waiting[0]).num_tokens
    return len(queues.running) + -(-num_tokens // queues.pool.block_size)


class Headroom:
    """What may be taken of one pool. Blocks that are referenced already cost nothing."""

    def __init__(self, pool: BlockPool, num_spoken_for: Callable[[], int]) -> None:
        self._pool = pool
        self._num_spoken_for = num_spoken_for

    @property
    def num_spare(self) -> int:
        """Free blocks that no request here needs."""
        return max(0, self._pool.num_free - self._num_spoken_for())

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """As BlockPool.match_prefix, as far as there are spare blocks. Takes no reference."""
        pool, num_spare = self._pool, self.num_spare
        matched = pool.match_prefix(hashes)
        if pool.num_free - pool.num_free_after_taking(matched) <= num_spare:
            return matched
        for count, block_id in enumerate(matched):
            num_spare -= pool.num_free - pool.num_free_after_taking([block_id])
            if num_spare < 0:
                return matched[:count]
        return matched

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """As `match_prefix`, with a reference to each block."""
        return self._pool.take_prefix(hashes[: len(self.match_prefix(hashes))])


class Filling:
    """Blocks that are being filled with what was fetched: a share of the pool at a time."""

    def __init__(self, pool: BlockPool, headroom: Headroom) -> None:
        self.num_blocks = 0
        self._max_blocks = int(pool.num_blocks * MAX_SHARE)
        self._headroom = headroom

    def room(self, num_blocks: int) -> int:
        """For how many of these blocks there is room, next to what runs here."""
        num_left = self._max_blocks - self.num_blocks
        return max(0, min(num_blocks, self._headroom.num_spare, num_left))

    @contextmanager
    def begun(self, num_blocks: int) -> Iterator[None]:
        """These are being filled within the context."""
        self.num_blocks += num_blocks
        try:
            yield
        finally:
            self.num_blocks -= num_blocks
