"""What coordinators hear of the prefix cache is what is in it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.cuda.pool import PrivatePool
from pdserve.commands.cli.node import SERVICES
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.node import runtime
from pdserve.node.planned import Planned
from pdserve.node.reports.kv_events import MAX_HASHES, KvEventFeed
from pdserve.node.start.cores import plan_cores
from pdserve.node.start.model import plan_model
from pdserve.protocol import KvEvents, KvTier, NodeRole
from pdserve.settings.config import EngineConfig, NodeConfig
from pdserve.settings.models import NodeOfModel

NUM_BLOCKS = 6


class Listener:
    """In place of a link: a coordinator that keeps count."""

    def __init__(self, *, is_attached: bool = True) -> None:
        self.is_attached = is_attached
        self.messages: list[KvEvents] = []
        self.held: set[bytes] = set()

    def send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, KvEvents)
        assert not set(message.stored) & set(message.evicted)
        self.messages.append(message)
        self.held |= set(message.stored)
        self.held -= set(message.evicted)


def make_feed(pool: BlockPool, *listeners: Listener) -> KvEventFeed:
    feed = KvEventFeed(list(listeners))
    pool.observe(feed.follow(KvTier.POOL, lambda: pool.hashes))
    return feed


def fill(pool: BlockPool, names: list[int]) -> None:
    """Compute a prompt of these blocks, and let go of it."""
    hashes = [name.to_bytes(16) for name in names]
    taken = pool.take_prefix(hashes)
    table = taken + pool.allocate(len(hashes) - len(taken))
    for block_id, block_hash in zip(table, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.release(table)


PROMPTS = st.lists(st.integers(0, 12), min_size=1, max_size=NUM_BLOCKS, unique=True)


@given(turns=st.lists(st.lists(PROMPTS, max_size=3), max_size=6), joins_at=st.integers(0, 5))
def test_every_listener_ends_up_with_what_the_pool_holds(
    turns: list[list[list[int]]], joins_at: int
) -> None:
    async def run() -> None:
        pool = BlockPool(NUM_BLOCKS, 4)
        early, late = Listener(), Listener(is_attached=False)
        feed = make_feed(pool, early, late)
        for number, prompts in enumerate(turns):
            for prompt in prompts:
                fill(pool, prompt)
            if number == joins_at:  # in mid-turn: with changes that nobody was told yet
                late.is_attached = True
                feed.attached(late)
                assert late.held == set(pool.hashes)
            await asyncio.sleep(0)
            assert early.held == set(pool.hashes)
            assert late.held == (set(pool.hashes) if late.is_attached else set())

    asyncio.run(run())


async def test_the_changes_of_a_turn_are_one_message() -> None:
    pool, listener = BlockPool(NUM_BLOCKS, 4), Listener()
    make_feed(pool, listener)
    fill(pool, [1, 2, 3])
    fill(pool, [4, 5, 6, 7])
    assert listener.messages == []
    await asyncio.sleep(0)
    (message,) = listener.messages
    assert (len(message.stored), len(message.evicted)) == (6, 1)
    await asyncio.sleep(0)
    assert len(listener.messages) == 1


async def test_messages_are_bounded() -> None:
    num_blocks = 2 * MAX_HASHES + 1
    pool, listener, late = BlockPool(num_blocks, 4), Listener(), Listener()
    feed = make_feed(pool, listener)
    fill(pool, list(range(num_blocks)))
    await asyncio.sleep(0)
    feed.attached(late)
    for heard in (listener, late):
        assert [len(m.stored) for m in heard.messages] == [MAX_HASHES, MAX_HASHES, 1]


@pytest.mark.parametrize("kind", ["cpu", "private"])
async def test_nobody_is_told_of_a_pool_that_nobody_can_reach(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = NodeConfig(engine=EngineConfig(device="cpu"))
    model = replace(plan_model(config), num_blocks=NUM_BLOCKS)
    if kind == "private":
        memory = PrivatePool(NUM_BLOCKS, model.layout.block_bytes)
        monkeypatch.setattr(runtime, "make_kv_memory", lambda *_, **__: memory)
    cores = plan_cores(config.engine, [0])
    planned = Planned(NodeOfModel(config), NodeRole.DECODE, model)
    node = runtime.Node(planned, cores, SERVICES)
    listener = Listener()
    fill(node._parts.pool, [1, 2, 3])
    node._kv_events.attached(listener)
    await node.close()
    assert len(listener.held) == (3 if kind == "cpu" else 0)
