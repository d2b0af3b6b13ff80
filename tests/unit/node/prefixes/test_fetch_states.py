"""Prefixes of models with states from other nodes: up to a snapshot, or not at all."""

from __future__ import annotations

from pdserve.node.prefixes.exports import MAX_SHARE
from tests.unit.node.prefixes.prefix_nodes import (
    BLOCK,
    NUM_BLOCKS,
    PROMPT,
    PrefixNode,
    started,
    steps_take,
)
from tests.waits import until

STATE = 3  # blocks


def make_node(name: str, **options: int) -> PrefixNode:
    return PrefixNode(name, state_blocks=STATE, **options)


async def test_a_prefix_comes_with_the_state_behind_it() -> None:
    puller, source = make_node("d"), make_node("p")
    async with started(puller, source):
        source.compute(PROMPT)
        source.keep_state(PROMPT[:32])
        hint = source.source_for(puller, 32)
        assert puller.fetcher.could_fetch(puller.prefix(), [hint])
        fetched = await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.num_usable_tokens() == puller.num_cached_tokens() == 32
        statistics = puller.fetcher.statistics
        assert fetched.from_nodes == statistics.tokens == 32
        assert statistics.bytes == (8 + STATE) * puller.layout.block_bytes
        assert not puller.fetcher.could_fetch(puller.prefix(), [hint]), "nothing is missing"


async def test_where_the_tokens_are_here_the_state_alone_comes() -> None:
    puller, source = make_node("d"), make_node("p")
    async with started(puller, source):
        for node in (puller, source):
            node.compute(PROMPT)
        source.keep_state(PROMPT[:32])
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 32)])
        assert puller.num_usable_tokens() == 32
        assert source.exports.statistics.blocks == STATE


async def test_a_snapshot_that_is_gone_is_replaced_by_an_earlier_one() -> None:
    """Of the source that has lost it, not even the tokens are pulled."""
    puller, first, second = make_node("d"), make_node("p0"), make_node("p1")
    async with started(puller, first, second):
        first.compute(PROMPT)
        second.compute(PROMPT)
        second.keep_state(PROMPT[:16])
        sources = [first.source_for(puller, 40), second.source_for(puller, 16)]
        await puller.fetcher.fetch(puller.prefix(), sources)
        assert puller.num_usable_tokens() == puller.num_cached_tokens() == 16
        assert puller.fetcher.statistics.failed == 1


async def test_the_tier_has_the_beginning_and_a_node_the_rest() -> None:
    puller, source = make_node("d", tier_blocks=20), make_node("p")
    async with started(puller, source):
        puller.compute(PROMPT[:20])
        assert puller.tier is not None
        statistics = puller.tier.tier.statistics
        await until(lambda: statistics.stored >= 5)
        puller.flood()
        source.compute(PROMPT)
        source.keep_state(PROMPT[:32])
        hint = source.source_for(puller, 32)
        fetched = await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.num_usable_tokens() == 32
        assert (fetched.from_tier, fetched.from_nodes) == (20, 12)


async def test_without_room_for_all_of_it_nothing_is_fetched() -> None:
    puller, source = make_node("d"), make_node("p")
    async with started(puller, source):
        source.compute(PROMPT)
        source.keep_state(PROMPT[:32])
        puller.num_spoken_for = NUM_BLOCKS - 8 - STATE + 1
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 32)])
        assert puller.num_cached_tokens() == 0
        assert puller.fetcher.statistics.crowded == 1
        assert source.exports.statistics.queries == 0


async def test_a_source_that_may_hold_only_a_part_gives_none() -> None:
    puller, source = make_node("d"), make_node("p")
    long = list(range(int(NUM_BLOCKS * MAX_SHARE) * BLOCK + 1))
    async with started(puller, source):
        source.compute(long)
        source.keep_state(long[:-1])
        hint = source.source_for(puller, len(long) - 1)
        await puller.fetcher.fetch(puller.prefix(long), [hint])
        assert puller.num_cached_tokens(long) == 0
        assert source.exports.statistics.curbed == 1


async def test_a_state_is_worth_the_tokens_before_it() -> None:
    """Where computing is fast, so little is not worth so many bytes; where it is slow, it is."""
    puller, source = PrefixNode("d", pull="auto", state_blocks=STATE), make_node("p")
    async with started(puller, source):
        for node in (puller, source):
            node.compute(PROMPT)
        source.keep_state(PROMPT[:32])
        hint = source.source_for(puller, 32)
        steps_take(puller, 1e-6)
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert (puller.num_usable_tokens(), puller.fetcher.statistics.declined) == (0, 1)
        steps_take(puller, 10.0)
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.num_usable_tokens() == 32
