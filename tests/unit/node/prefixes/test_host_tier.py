"""Between pool and host tier: what is evicted comes back, and nobody is in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag
from pdserve.node.prefixes.host_tier import BATCH, NodeTier, TierBlocks, make_tier_blocks
from pdserve.node.start.model import plan_model
from pdserve.settings.config import EngineConfig, NodeConfig
from pdserve.settings.prefixes import PrefixConfig
from pdserve.shared.errors import ConfigError
from tests.fakes.gpus import FakeHost
from tests.full_disk import full_disk
from tests.unit.node.prefixes.prefix_nodes import (
    BLOCK,
    NUM_BLOCKS,
    PROMPT,
    PrefixNode,
    made_fetcher,
    make_layout,
    started,
    steps_take,
)
from tests.waits import until

OTHER = list(range(500, 500 + 12 * BLOCK + 1))


def tier_of(node: PrefixNode) -> NodeTier:
    assert node.tier is not None
    return node.tier


async def until_stored(node: PrefixNode, num_blocks: int) -> None:
    await until(lambda: tier_of(node).tier.statistics.stored >= num_blocks)
    await until(lambda: node.pool.num_free == NUM_BLOCKS)


@pytest.fixture(params=["cpu", "gpu"])
def gpus(request: pytest.FixtureRequest) -> FakeHost | None:
    """None: the pools are in CPU memory, and the tiers in files."""
    return FakeHost() if request.param == "gpu" else None


@pytest_asyncio.fixture
async def node(gpus: FakeHost | None) -> AsyncIterator[PrefixNode]:
    node = PrefixNode("n", tier_blocks=20, gpus=gpus)
    async with started(node):
        yield node
    assert gpus is None or gpus.num_lanes == 0


async def test_an_evicted_prompt_comes_back_bit_exact(node: PrefixNode) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    node.flood()
    assert node.num_cached_tokens() == 0
    prefix = node.prefix()
    assert node.fetcher.could_fetch(prefix, [])
    await node.fetcher.fetch(prefix, [])
    assert node.num_cached_tokens() == 48
    assert node.fetcher.statistics.tier_tokens == 48
    assert not node.fetcher.could_fetch(prefix, [])


async def test_a_snapshot_comes_back_with_its_prefix() -> None:
    """In a model with states, where a prefix ends with its last snapshot."""
    node = PrefixNode("n", tier_blocks=20, state_blocks=2)
    async with started(node):
        node.compute(PROMPT)
        node.keep_state(PROMPT[: 8 * BLOCK])
        assert node.num_usable_tokens() == 8 * BLOCK
        assert not node.fetcher.could_fetch(node.prefix(), []), "nothing is missing"
        await until_stored(node, 14)
        node.flood()
        assert (node.num_usable_tokens(), len(node.pool.snapshots or ())) == (0, 0)
        await node.fetcher.fetch(node.prefix(), [])
        assert node.num_cached_tokens() == 8 * BLOCK, "none behind the snapshot"
        assert node.num_usable_tokens() == 8 * BLOCK
        assert node.fetcher.statistics.tier_tokens == 8 * BLOCK
        node.pool.check_integrity()


async def test_what_was_evicted_in_part_is_completed(node: PrefixNode) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    node.pool.release(node.pool.allocate(NUM_BLOCKS - 5))  # a chain's end goes first
    assert 0 < node.num_cached_tokens() < 48
    await node.fetcher.fetch(node.prefix(), [])
    assert node.num_cached_tokens() == 48


async def test_what_the_pool_holds_behind_a_gap_is_not_copied(node: PrefixNode) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    hashes = node.prefix().hashes
    (gap,) = node.pool.take_prefix(hashes[3:4])
    kept = node.pool.take_prefix(hashes[:3]) + node.pool.take_prefix(hashes[4:])
    node.pool.release([gap])
    node.flood()
    node.pool.release(kept)
    assert node.num_cached_tokens() == 3 * BLOCK
    await node.fetcher.fetch(node.prefix(), [])
    assert node.num_cached_tokens() == 48
    assert tier_of(node).tier.statistics.loaded == 1
    assert node.fetcher.statistics.tier_tokens == BLOCK


async def test_a_tier_that_is_too_slow_is_learned_from(node: PrefixNode) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    node.flood()
    fetcher = made_fetcher(node.parts, "auto", timeout_s=3600)
    steps_take(node, 0.05)

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    tier_of(node).tier.load = hang  # type: ignore[method-assign]
    await fetcher.fetch(node.prefix(), [])
    assert fetcher.statistics.timed_out == 1
    await fetcher.fetch(node.prefix(), [])
    assert (fetcher.statistics.timed_out, fetcher.statistics.declined) == (1, 1)


async def test_where_the_tier_ends_another_node_goes_on(node: PrefixNode) -> None:
    source = PrefixNode("p", gpus=node.gpus)
    async with started(source):
        node.compute(PROMPT[:20])
        await until_stored(node, 5)
        node.flood()
        source.compute(PROMPT)
        await node.fetcher.fetch(node.prefix(), [source.source_for(node, 48)])
        assert node.num_cached_tokens() == 48
        statistics = node.fetcher.statistics
        assert (statistics.tier_tokens, statistics.tokens) == (20, 28)


async def test_the_tier_keeps_what_was_used_last(node: PrefixNode) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    node.compute(OTHER)
    await until_stored(node, 24)
    tier = tier_of(node)
    assert tier.tier.num_held == 20
    assert [h in tier.tier for h in node.prefix(OTHER).hashes] == [True] * 12
    assert [h in tier.tier for h in node.prefix().hashes] == [True] * 8 + [False] * 4


async def test_storing_does_not_change_who_is_evicted_next() -> None:
    def cached_after(node: PrefixNode) -> list[bytes]:
        node.pool.release(node.pool.allocate(NUM_BLOCKS - 7))
        return list(node.pool.hashes)

    with_tier, without = PrefixNode("a", tier_blocks=40), PrefixNode("b")
    async with started(with_tier, without):
        for node in (with_tier, without):
            node.compute(OTHER)
            node.compute(PROMPT)
        await until_stored(with_tier, 24)
        assert cached_after(with_tier) == cached_after(without)


async def test_a_tier_smaller_than_a_prompt_comes_to_rest() -> None:
    """Each block is copied once, though the tier has forgotten it by then."""
    node = PrefixNode("n", tier_blocks=3)
    async with started(node):
        node.compute(PROMPT)
        await until_stored(node, 12)
        await asyncio.sleep(0.05)
        assert tier_of(node).tier.statistics.stored == 12
        assert tier_of(node).tier.num_held == 3


async def test_a_copy_that_fails_costs_only_its_own_blocks(
    node: PrefixNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []

    def fail(spans: Spans, cancel: CancelFlag) -> None:
        failed.append(len(spans))
        raise OSError("an odd fault")

    with monkeypatch.context() as patch:
        patch.setattr(tier_of(node).tier._here._parts[0], "store", fail)
        node.compute(PROMPT)
        await until(lambda: len(failed) >= 2 and node.pool.num_free == NUM_BLOCKS)
        await until(lambda: not tier_of(node)._freed)
    assert [record.levelname for record in caplog.records] == ["ERROR"], "each reason once"
    assert "an odd fault" in caplog.text
    node.compute(OTHER)
    await until_stored(node, 12)
    node.flood()
    node.compute(PROMPT)
    await until_stored(node, 24)
    node.pool.check_integrity()


async def test_few_blocks_are_kept_from_being_evicted_at_a_time() -> None:
    node = PrefixNode("n", tier_blocks=NUM_BLOCKS)
    held: list[int] = []
    store = tier_of(node).tier.store

    async def watched(hashes: list[bytes], block_ids: list[int]) -> None:
        held.append(NUM_BLOCKS - node.pool.num_free)
        await store(hashes, block_ids)

    tier_of(node).tier.store = watched  # type: ignore[assignment,method-assign]
    async with started(node):
        node.compute(list(range(NUM_BLOCKS * BLOCK)))
        await until_stored(node, NUM_BLOCKS)
        assert max(held) <= min(BATCH, NUM_BLOCKS // 8)


async def test_blocks_of_a_pool_without_room_are_left_alone(node: PrefixNode) -> None:
    running = node.pool.allocate(NUM_BLOCKS - 5)
    node.compute(PROMPT[:20])
    for _ in range(20):
        await asyncio.sleep(0)
    assert node.pool.num_free == 5
    assert tier_of(node).tier.statistics.stored == 0
    node.flood()  # too late for these
    assert not tier_of(node)._freed
    node.compute(PROMPT[:20])
    node.pool.release(running)
    await until_stored(node, 5)


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_cancelled_load_holds_nothing(node: PrefixNode, num_turns: int) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    node.flood()
    fetch = asyncio.create_task(node.fetcher.fetch(node.prefix(), []))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    assert node.pool.num_free == NUM_BLOCKS
    assert node.num_cached_tokens() in (0, 48)


async def test_a_block_that_the_tier_lost_meanwhile_is_not_published(node: PrefixNode) -> None:
    node.compute(PROMPT)
    await until_stored(node, 12)
    node.flood()
    tier = tier_of(node).tier
    fetch = asyncio.create_task(node.fetcher.fetch(node.prefix(), []))
    await asyncio.sleep(0)  # the load is under way: now every slot gets other content
    others = [number.to_bytes(16) for number in range(20)]
    await tier.store(others, [node.pool.allocate(1)[0]] * 20)
    await fetch
    blocks = [b for b in range(NUM_BLOCKS) if node.pool._references[b]]
    node.pool.release(blocks)
    assert node.num_cached_tokens() == 0
    assert tier.statistics.stale == 1


def make_blocks(prefix: PrefixConfig) -> TierBlocks | None:
    layout, device = make_layout(), torch.device("cpu")
    model = replace(plan_model(NodeConfig()), layout=layout, device=device)
    return make_tier_blocks(NodeConfig(prefix=prefix), model)


def test_the_tier_is_as_large_as_the_config_says() -> None:
    assert make_blocks(PrefixConfig()) is None
    blocks = make_blocks(PrefixConfig(tier_memory=str(5 * make_layout().block_bytes + 1)))
    assert blocks is not None
    assert blocks.num_blocks == 5
    with pytest.raises(ConfigError, match="less than a block"):
        make_blocks(PrefixConfig(tier_memory="1"))
    with pytest.raises(ConfigError, match="/nowhere"):
        make_blocks(PrefixConfig(tier_memory="1MiB", tier_dir="/nowhere"))


def test_without_room_for_its_tier_a_node_does_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk():
        assert make_blocks(PrefixConfig(tier_memory="1MiB", tier_dir=str(tmp_path))) is None
    assert str(tmp_path) in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_could_never_be_filled_is_refused() -> None:
    without = EngineConfig(prefix_cache=False)
    NodeConfig(engine=without)
    for prefix in (PrefixConfig(tier_memory="1MiB"), PrefixConfig(kv_store="/tmp/kv")):
        with pytest.raises(ValueError, match="without prefix_cache"):
            NodeConfig(engine=without, prefix=prefix)
