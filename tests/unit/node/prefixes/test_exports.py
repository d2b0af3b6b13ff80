"""What a node holds for others: how much, how long, and that it lets go of it in every ending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kv_transfer.exporter import Exporter
from kv_transfer.ticket import read_ticket
from pdserve.node.prefixes.exports import MAX_HASHES, MAX_QUERIES, MAX_SHARE, PrefixHolds
from pdserve.protocol import PrefixAnswer, PrefixQuery
from pdserve.shared.errors import MalformedMessage
from tests.unit.node.prefixes.prefix_nodes import (
    BLOCK,
    NUM_BLOCKS,
    PROMPT,
    TIMEOUTS,
    PrefixNode,
    started,
)
from tests.waits import until

LONG = list(range(NUM_BLOCKS * BLOCK))


class Session:
    """One session's holds, and what it was answered."""

    def __init__(self, node: PrefixNode) -> None:
        self.node = node
        self.answers: list[PrefixAnswer] = []
        self.holds: PrefixHolds = node.exports.open(self._receive)

    def _receive(self, message: msgspec.Struct) -> None:
        assert isinstance(message, PrefixAnswer)
        self.answers.append(message)

    def ask(
        self, query_id: str = "q", token_ids: list[int] = PROMPT, first_block: int = 0
    ) -> PrefixAnswer:
        hashes = self.node.prefix(token_ids).hashes[first_block:]
        self.holds.answer(PrefixQuery(query_id=query_id, first_block=first_block, hashes=hashes))
        return self.answers[-1]


@pytest_asyncio.fixture
async def node() -> AsyncIterator[PrefixNode]:
    node = PrefixNode("p")
    async with started(node):
        yield node


async def test_blocks_are_held_until_they_are_settled(node: PrefixNode) -> None:
    node.compute(PROMPT)
    session = Session(node)
    answer = session.ask(first_block=3)
    assert answer.num_blocks == 9
    ticket = read_ticket(answer.ticket)
    assert (ticket.first_token, ticket.num_tokens) == (3 * BLOCK, 9 * BLOCK)
    node.flood()
    assert (node.memory.generations[ticket.block_ids] == ticket.generations).all()
    session.holds.settle("q")
    assert node.pool.num_free == NUM_BLOCKS
    assert (node.memory.generations[ticket.block_ids] != ticket.generations).all()


async def test_what_is_not_there_is_not_held(node: PrefixNode) -> None:
    session = Session(node)
    assert session.ask() == PrefixAnswer(query_id="q")
    assert "q" not in session.holds
    node.compute(PROMPT[:8])
    assert session.ask().num_blocks == 2
    session.holds.close()


async def test_a_session_that_ends_lets_go_of_everything(node: PrefixNode) -> None:
    node.compute(PROMPT)
    session = Session(node)
    for number in range(3):
        session.ask(str(number))
    node.flood()
    assert node.pool.num_free == NUM_BLOCKS - 12
    session.holds.close()
    assert node.pool.num_free == NUM_BLOCKS


async def test_a_lease_ends_what_nobody_settles() -> None:
    node = PrefixNode("p", timeouts=replace(TIMEOUTS, lease_s=0.05, prefix_s=0.01))
    async with started(node):
        node.compute(PROMPT)
        session = Session(node)
        session.ask()
        assert node.pool.num_free < NUM_BLOCKS
        await until(lambda: node.pool.num_free == NUM_BLOCKS)
        assert node.exports.statistics.expired == 1
        assert "q" not in session.holds


async def test_what_is_settled_has_no_lease() -> None:
    node = PrefixNode("p", timeouts=replace(TIMEOUTS, lease_s=0.01, prefix_s=0.02))
    async with started(node):
        node.compute(PROMPT)
        session = Session(node)
        session.ask("settled")
        session.holds.settle("settled")
        session.ask("left")
        await until(lambda: "left" not in session.holds)
        assert node.exports.statistics.expired == 1


@pytest.mark.parametrize(("lease_s", "prefix_s"), [(10.0, 2.0), (1.0, 30.0)])
async def test_a_lease_is_not_over_before_a_pull_may_be(lease_s: float, prefix_s: float) -> None:
    timeouts = replace(TIMEOUTS, lease_s=lease_s, prefix_s=prefix_s)
    node = PrefixNode("p", timeouts=timeouts)
    assert node.exports.lease_s == max(lease_s, prefix_s)
    node.memory.close()


async def test_sessions_share_what_may_be_held(node: PrefixNode) -> None:
    node.compute(LONG)
    limit = int(NUM_BLOCKS * MAX_SHARE)
    sessions = [Session(node) for _ in range(3)]
    assert sessions[0].ask("a", LONG[:49]).num_blocks == 12
    assert sessions[1].ask("b", LONG, 12).num_blocks == limit - 12
    assert sessions[2].ask("c", LONG, limit).num_blocks == 0
    assert node.exports.statistics.curbed == 2
    assert node.exports.num_held_blocks == limit
    sessions[0].holds.close()
    assert sessions[2].ask("d", LONG, limit).num_blocks == 12
    for session in sessions:
        session.holds.close()
    assert node.exports.num_held_blocks == 0


async def test_a_block_that_several_pull_is_held_once(node: PrefixNode) -> None:
    node.compute(PROMPT)
    sessions = [Session(node) for _ in range(3)]
    assert [session.ask().num_blocks for session in sessions] == [12, 12, 12]
    assert node.exports.num_held_blocks == 12
    sessions[0].holds.close()
    sessions[1].holds.close()
    assert node.exports.num_held_blocks == 12
    assert node.pool.num_free == NUM_BLOCKS - 12
    sessions[2].holds.close()
    assert node.exports.num_held_blocks == 0


async def test_requests_here_keep_the_blocks_that_they_may_need(node: PrefixNode) -> None:
    node.compute(PROMPT)
    session = Session(node)
    node.num_spoken_for = NUM_BLOCKS - 5
    assert session.ask("a").num_blocks == 5
    assert session.ask("b").num_blocks == 5  # those cost nothing any more
    assert node.exports.statistics.curbed == 2
    in_use = node.pool.take_prefix(node.prefix().hashes)
    assert session.ask("c").num_blocks == 12  # a request here needs them anyway
    node.pool.release(in_use)
    session.holds.close()


async def test_an_answer_has_as_many_blocks_as_its_ticket_has_room_for(
    tiered: PrefixNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exporter, "max_ticket_blocks", 5)
    tiered.compute(PROMPT)
    session = Session(tiered)
    assert session.ask().num_blocks == 5
    assert read_ticket(session.answers[-1].ticket).num_tokens == 5 * BLOCK
    assert session.ask("rest", first_block=5).num_blocks == 5
    assert tiered.exports.num_held_blocks == 10
    session.holds.close()


async def test_a_session_has_so_many_queries_at_a_time(node: PrefixNode) -> None:
    node.compute(PROMPT[:5])
    session = Session(node)
    for number in range(MAX_QUERIES):
        assert session.ask(str(number), PROMPT[:5]).num_blocks == 1
    assert session.ask("one more", PROMPT[:5]).num_blocks == 0
    session.holds.settle("0")
    assert session.ask("now", PROMPT[:5]).num_blocks == 1
    session.holds.close()


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        (PrefixQuery(query_id="q", first_block=0, hashes=[]), "0 blocks"),
        (PrefixQuery(query_id="q", first_block=-1, hashes=[b"x" * 16]), "from block -1"),
        (PrefixQuery(query_id="q", first_block=0, hashes=[b"x"]), "no block hash"),
        (PrefixQuery(query_id="q", first_block=0, hashes=[b"x" * 16] * (MAX_HASHES + 1)), "1 to"),
    ],
    ids=["empty", "negative", "short", "endless"],
)
async def test_queries_that_cannot_be_are_refused(
    node: PrefixNode, query: PrefixQuery, complaint: str
) -> None:
    with pytest.raises(MalformedMessage, match=complaint):
        Session(node).holds.answer(query)


async def test_a_query_id_names_one_query(node: PrefixNode) -> None:
    node.compute(PROMPT)
    session = Session(node)
    session.ask("q")
    with pytest.raises(MalformedMessage, match="asked before"):
        session.ask("q")
    session.holds.close()


# ---- with a host tier ----------------------------------------------------------------------------


@pytest_asyncio.fixture
async def tiered() -> AsyncIterator[PrefixNode]:
    """A node whose prompt is in its host tier only."""
    node = PrefixNode("p", tier_blocks=20)
    async with started(node):
        node.compute(PROMPT)
        assert node.tier is not None
        await until(lambda: node.tier.tier.num_held == 12)
        await until(lambda: node.pool.num_free == NUM_BLOCKS)
        node.flood()
        assert node.num_cached_tokens() == 0
        yield node


async def test_a_prefix_out_of_the_host_tier_is_given_too(tiered: PrefixNode) -> None:
    puller = PrefixNode("d")
    async with started(puller):
        tiered.compute(PROMPT[:20])
        await puller.fetcher.fetch(puller.prefix(), [tiered.source_for(puller, 48)])
        assert puller.num_cached_tokens() == 48
        assert tiered.num_cached_tokens() == 48


async def test_the_tier_brings_up_what_there_is_room_for(tiered: PrefixNode) -> None:
    session = Session(tiered)
    tiered.num_spoken_for = NUM_BLOCKS - 5
    hashes = tiered.prefix().hashes
    session.holds.answer(PrefixQuery(query_id="q", first_block=0, hashes=hashes))
    assert tiered.exports.num_held_blocks == 5
    await until(lambda: len(session.answers) == 1)
    assert session.answers[0].num_blocks == 5
    assert tiered.exports.num_held_blocks == 5
    assert tiered.exports.statistics.curbed == 1
    session.holds.close()


async def test_a_tier_that_breaks_is_answered_without(
    tiered: PrefixNode, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(hashes: list[bytes], block_ids: list[int]) -> None:
        raise OSError("the disk is gone")

    assert tiered.tier is not None
    tiered.tier.tier.load = broken  # type: ignore[assignment,method-assign]
    tiered.compute(PROMPT[:20])
    session = Session(tiered)
    hashes = tiered.prefix().hashes
    session.holds.answer(PrefixQuery(query_id="q", first_block=0, hashes=hashes))
    await until(lambda: len(session.answers) == 1)
    assert session.answers[0].num_blocks == 5
    assert "the disk is gone" in caplog.text
    session.holds.close()


async def test_closing_waits_for_what_is_being_loaded(tiered: PrefixNode) -> None:
    session = Session(tiered)
    hashes = tiered.prefix().hashes
    session.holds.answer(PrefixQuery(query_id="q", first_block=0, hashes=hashes))
    await asyncio.sleep(0)
    session.holds.close()
    assert tiered.pool.num_free == NUM_BLOCKS - 12
    await tiered.exports.close()
    assert tiered.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("num_turns", [0, 1])
@pytest.mark.parametrize("ending", ["settle", "close"])
async def test_an_end_while_the_tier_is_being_read(
    tiered: PrefixNode, ending: str, num_turns: int
) -> None:
    session = Session(tiered)
    hashes = tiered.prefix().hashes
    session.holds.answer(PrefixQuery(query_id="q", first_block=0, hashes=hashes))
    for _ in range(num_turns):  # without one, the task never begins
        await asyncio.sleep(0)
    assert tiered.exports.num_held_blocks == 12
    assert tiered.pool.num_free == NUM_BLOCKS - 12 * num_turns
    if ending == "settle":
        session.holds.settle("q")
    else:
        session.holds.close()
    await tiered.assert_baseline()
    assert session.answers == []
