"""How many blocks of a node's pool prefixes may use, beside the requests that run there.

Fetching a prefix, or holding one for another node, saves some time at best; preempting a request
for it costs more. So neither takes blocks that requests need now or may need soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.scheduler import Queues

MAX_SHARE = 0.5  # of the pool's blocks that fetches may fill at a time


def num_spoken_for(queues: Queues) -> int:
    """Blocks that requests here may need: one for each running request, and all for the next one.

    While a policy keeps prompts out, this is the whole pool, since these prompts wait for blocks.
    While a preempted request's KV is fetched, that request is the next one, so nothing is reserved
    for the requests that wait.
    """
    if queues.held_back.is_running:
        return queues.pool.num_blocks
    num_next = 0
    if queues.waiting and not queues.preemptions.away:
        following = queues.kept_out or queues.waiting[0]
        num_next = queues.pool.blocks_for(following.num_tokens) + queues.pool.state_blocks
    return len(queues.running) + num_next


class Headroom:
    """How many blocks may be taken from one pool. Blocks already referenced cost nothing."""

    def __init__(self, pool: BlockPool, num_spoken_for: Callable[[], int]) -> None:
        self._pool = pool
        self._num_spoken_for = num_spoken_for

    @property
    def num_spare(self) -> int:
        """Free blocks that no request here needs."""
        return max(0, self._pool.num_free - self._num_spoken_for())

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """As BlockPool.match_whole, limited to the spare blocks. Takes no reference."""
        pool, num_spare = self._pool, self.num_spare
        matched = pool.match_whole(hashes)
        if pool.num_free - pool.num_free_after_taking(matched) <= num_spare:
            return matched
        for count, block_id in enumerate(matched):
            num_spare -= pool.num_free - pool.num_free_after_taking([block_id])
            if num_spare < 0:
                return matched[:count]
        return matched

    def want(self, num_blocks: int) -> None:
        """Have so many to spare, if there is memory for them."""
        if (num_missing := num_blocks - self.num_spare) > 0:
            self._pool.want(num_missing)

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """As `match_prefix`, with a reference to each block."""
        return self._pool.take_prefix(hashes[: len(self.match_prefix(hashes))])


class Filling:
    """Limits how many blocks are being filled by fetches at a time."""

    def __init__(self, pool: BlockPool, headroom: Headroom) -> None:
        self.num_blocks = 0
        self._max_blocks = int(pool.num_blocks * MAX_SHARE)
        self._headroom = headroom

    def room(self, num_blocks: int) -> int:
        """How many of `num_blocks` blocks may be filled now."""
        num_left = self._max_blocks - self.num_blocks
        self._headroom.want(min(num_blocks, num_left))
        return max(0, min(num_blocks, self._headroom.num_spare, num_left))

    @contextmanager
    def begun(self, num_blocks: int) -> Iterator[None]:
        """Count these blocks as being filled while the context lasts."""
        self.num_blocks += num_blocks
        try:
            yield
        finally:
            self.num_blocks -= num_blocks
