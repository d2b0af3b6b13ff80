"""Blocks that lack the KV of layers with windows: which prefixes they are part of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.kv import need

HASHES = [bytes([n]) * 16 for n in range(90)]


class Told:
    """A CacheObserver."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def stored(self, block_hash: bytes) -> None:
        self.hashes.add(block_hash)

    def evicted(self, block_hash: bytes) -> None:
        self.hashes.remove(block_hash)

    def freed(self, block_hash: bytes) -> None:
        assert block_hash in self.hashes


def pulled(pool: BlockPool, num_tokens: int) -> list[int]:
    """The blocks of a stream that came from elsewhere, and are published."""
    table = pool.allocate(pool.blocks_for(num_tokens))
    pool.lack_windows(table, 0, num_tokens)
    for index in range(pool.full_blocks(num_tokens)):
        pool.publish(table[index], HASHES[index])
    return table


@given(size=st.integers(1, 8), window=st.integers(2, 30), num_tokens=st.integers(1, 80))
def test_who_goes_on_behind_a_prefix_sees_nothing_that_lacks(
    size: int, window: int, num_tokens: int
) -> None:
    pool = BlockPool(200, size, windows=[window])
    observer = Told()
    pool.observe(observer)
    table = pulled(pool, num_tokens)
    first = need.window_block(num_tokens, window, size) * size  # tokens before it are not there
    assert first <= max(0, num_tokens - window + 1)
    for count in range(pool.full_blocks(num_tokens) + 1):
        found = pool.match_prefix(HASHES[:count])
        assert not found or max(0, pool.tokens_in(len(found)) - window + 1) >= first
    reusable = (num_tokens - 1) // size
    assert len(pool.match_prefix(HASHES[:reusable])) == reusable, "as for siblings, or a preemption"
    assert observer.hashes == set(pool.hashes)
    assert (HASHES[0] in pool) == (pool.full_blocks(num_tokens) > 0 and not first)
    assert len(pool.match_whole(HASHES)) == (0 if first else pool.full_blocks(num_tokens))
    pool.release(table)
    pool.check_integrity()
    pool.allocate(200)
    pool.check_integrity()
    assert not observer.hashes


def test_a_whole_block_takes_the_place_of_one_that_lacks() -> None:
    pool = BlockPool(8, 4, windows=[4])
    table = pulled(pool, 17)
    own = pool.allocate(1)
    pool.publish(own[0], HASHES[0])
    assert pool.match_whole(HASHES) == own
    pool.release(table)
    pool.check_integrity()
    again = pool.allocate(1)
    pool.lack_windows(again, 0, 100)
    pool.publish(again[0], HASHES[0])
    assert pool.match_whole(HASHES) == own, "but not the other way round"
