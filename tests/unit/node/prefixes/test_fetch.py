"""Pulling prefixes from other nodes: what arrives, what does not, and what is held afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pdserve.node.prefixes.cost import patience_s
from pdserve.node.prefixes.headroom import MAX_SHARE
from pdserve.protocol import NodeAddress, PrefixAnswer, PrefixSource, StepCosts
from pdserve.settings.prefixes import PrefixPull
from pdserve.shared.errors import CorruptTransfer, PeerLost
from tests.unit.node.prefixes.prefix_nodes import (
    BLOCK,
    NUM_BLOCKS,
    PROMPT,
    PrefixNode,
    made_fetcher,
    started,
    steps_take,
)
from tests.waits import WITHIN_S, leap, until


@pytest.mark.parametrize(("here", "there"), [(4, 4), (4, 8), (8, 4), (4, 16), (3, 5)])
async def test_what_is_fetched_is_what_the_source_has(here: int, there: int) -> None:
    puller, source = PrefixNode("d", here), PrefixNode("p", there)
    async with started(puller, source):
        source.compute(PROMPT)
        held = len(PROMPT) // there * there
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, held)])
        fetched = min(held, len(PROMPT) - 1) // here * here
        assert puller.num_cached_tokens() == fetched
        statistics = puller.fetcher.statistics
        assert statistics.tokens == fetched
        assert statistics.bytes == fetched * puller.layout.token_bytes
        assert statistics.failed == 0


async def test_only_what_is_missing_is_fetched() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        puller.compute(PROMPT[:20])
        source.compute(PROMPT)
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 48)])
        assert puller.num_cached_tokens() == 48
        assert puller.fetcher.statistics.tokens == 28


async def test_a_prompt_that_ends_with_its_block_is_not_fetched_whole() -> None:
    puller, source = PrefixNode("d", 4), PrefixNode("p", 8)
    prompt = PROMPT[:48]
    async with started(puller, source):
        source.compute(prompt)
        await puller.fetcher.fetch(puller.prefix(prompt), [source.source_for(puller, 48)])
        assert puller.num_cached_tokens(prompt) == 44


async def test_what_is_here_is_not_written_to() -> None:
    """The source's blocks begin before ours end; somebody may be reading ours."""
    puller, source = PrefixNode("d", 4), PrefixNode("p", 8)
    async with started(puller, source):
        puller.compute(PROMPT[:20])
        before = puller.memory.data[puller.pool.match_prefix(puller.prefix().hashes)].copy()
        source.compute(PROMPT, seed=2)
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 48)])
        block_ids = puller.pool.match_prefix(puller.prefix().hashes)
        assert len(block_ids) == 12
        assert (puller.memory.data[block_ids[:5]] == before).all()
        for index in range(5, 12):
            expected = puller.content(index, seed=2).reshape(-1)
            assert (puller.memory.data[block_ids[index]] == expected).all()


async def test_a_source_is_asked_for_what_the_one_before_did_not_have() -> None:
    puller, first, second = PrefixNode("d"), PrefixNode("p0"), PrefixNode("p1")
    async with started(puller, first, second):
        first.compute(PROMPT[:12])  # the rest has been evicted since the coordinator heard of it
        second.compute(PROMPT[:32])
        sources = [first.source_for(puller, 48), second.source_for(puller, 32)]
        await puller.fetcher.fetch(puller.prefix(), sources)
        assert puller.num_cached_tokens() == 32
        assert puller.fetcher.statistics.tokens == 32
        assert [node.exports.statistics.blocks for node in (first, second)] == [3, 5]


async def test_a_lost_source_is_replaced_by_the_next_one() -> None:
    puller, lost, second = PrefixNode("d"), PrefixNode("p0"), PrefixNode("p1")
    async with started(puller, lost, second):
        await lost.server.stop(0)
        second.compute(PROMPT[:32])
        sources = [lost.source_for(puller, 48), second.source_for(puller, 32)]
        await puller.fetcher.fetch(puller.prefix(), sources)
        assert puller.num_cached_tokens() == 32
        statistics = puller.fetcher.statistics
        assert (statistics.failed, statistics.replanned) == (1, 1)


async def test_a_source_that_has_nothing_any_more_costs_a_question() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 48)])
        assert puller.num_cached_tokens() == 0
        assert puller.fetcher.statistics.failed == 1
        assert source.exports.statistics.queries == 1


async def test_a_former_life_of_a_source_is_not_pulled_from() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        hint = source.source_for(puller, 48)
        stale = PrefixSource(
            node=type(hint.node)(
                node_id="p", incarnation="p-0", session_address=hint.node.session_address
            ),
            num_tokens=48,
        )
        await puller.fetcher.fetch(puller.prefix(), [stale])
        assert puller.fetcher.statistics.failed == 1
        assert puller.num_cached_tokens() == 0


async def test_a_prefix_is_fetched_once_however_many_want_it() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        hint = source.source_for(puller, 48)
        await asyncio.gather(*(puller.fetcher.fetch(puller.prefix(), [hint]) for _ in range(5)))
        assert puller.num_cached_tokens() == 48
        assert puller.fetcher.statistics.tokens == 48
        assert source.exports.statistics.queries == 1


async def test_who_waited_in_vain_computes() -> None:
    puller, lost = PrefixNode("d"), PrefixNode("p")
    async with started(puller, lost):
        await lost.server.stop(0)
        hint = lost.source_for(puller, 48)
        await asyncio.gather(*(puller.fetcher.fetch(puller.prefix(), [hint]) for _ in range(3)))
        assert puller.fetcher.statistics.failed == 1


async def test_what_is_cheaper_to_compute_is_not_fetched() -> None:
    puller, source = PrefixNode("d", pull="auto"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        hint = source.source_for(puller, 48)
        steps_take(puller, 1e-6)
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert source.exports.statistics.queries == 0
        assert puller.fetcher.statistics.declined == 1
        steps_take(puller, 5.0)
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.num_cached_tokens() == 48


async def test_nothing_is_asked_for_when_pulling_is_off() -> None:
    puller, source = PrefixNode("d", pull="never"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        hint = source.source_for(puller, 48)
        assert not puller.fetcher.could_fetch(puller.prefix(), [hint])
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert source.exports.statistics.queries == 0


async def test_a_hint_for_what_is_here_already_is_nothing_to_fetch() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        hint = source.source_for(puller, 20)
        assert puller.fetcher.could_fetch(puller.prefix(), [hint])
        puller.compute(PROMPT[:20])
        assert not puller.fetcher.could_fetch(puller.prefix(), [hint])


async def test_running_requests_keep_the_blocks_that_they_may_need() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        hint = source.source_for(puller, 48)
        running = puller.pool.allocate(NUM_BLOCKS - 9)
        puller.num_spoken_for = 4
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.num_cached_tokens() == 5 * BLOCK
        puller.num_spoken_for = 9
        puller.flood()
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.num_cached_tokens() == 0
        assert puller.fetcher.statistics.crowded == 1
        puller.pool.release(running)


async def test_what_is_here_is_left_alone_where_requests_need_room() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        puller.compute(PROMPT[:32])
        puller.num_spoken_for = NUM_BLOCKS - 7
        await puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 48)])
        assert puller.fetcher.statistics.crowded == 1
        assert source.exports.statistics.queries == 0


async def test_a_source_that_cannot_be_reached_is_not_dialled_for_every_prompt() -> None:
    puller, lost = PrefixNode("d"), PrefixNode("p")
    async with started(puller, lost):
        await lost.server.stop(0)
        hint = lost.source_for(puller, 48)
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.fetcher.statistics.failed == 1
        assert not puller.fetcher.could_fetch(puller.prefix(), [hint])
        await puller.fetcher.fetch(puller.prefix(), [hint])
        assert puller.fetcher.statistics.failed == 1


async def test_a_share_of_the_pool_is_filled_at_a_time() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    prompt = list(range(NUM_BLOCKS * BLOCK))
    async with started(puller, source):
        source.compute(prompt)
        source.exports._max_held = NUM_BLOCKS  # it would give all
        await puller.fetcher.fetch(
            puller.prefix(prompt), [source.source_for(puller, NUM_BLOCKS * BLOCK)]
        )
        assert puller.num_cached_tokens(prompt) == int(NUM_BLOCKS * MAX_SHARE) * BLOCK


# ---- a source that a test plays ----------------------------------------------------------------


class ScriptedSource:
    """In place of the sessions: a source that says what the test wants, when the test wants."""

    def __init__(
        self,
        puller: PrefixNode,
        source: PrefixNode,
        pull: PrefixPull = "always",
        timeout_s: float = WITHIN_S,
    ) -> None:
        self._source = source
        self.hint = source.source_for(puller, 48)
        self.peer = self.hint.node
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.answer: PrefixAnswer | None = None
        self.num_open = 0
        self.is_open = False  # when it has not been asked yet
        self.link = self
        self.welcome = self
        self.layout = source.layout
        self.transport = "scripted"
        self.fetcher = made_fetcher(
            replace(puller.parts, sessions=self, puller=self),  # type: ignore[arg-type]
            pull,
            timeout_s,
        )
        self.pulling = asyncio.Event()
        self.may_arrive = asyncio.Event()
        self.failure: Exception | None = None

    async def get(self, _: object) -> ScriptedSource:
        return self

    def opened(self, _: object) -> ScriptedSource | None:
        return self if self.is_open else None

    def has_failed(self, _: object) -> bool:
        return False

    @asynccontextmanager
    async def prefix(
        self, first_block: int, hashes: Sequence[bytes]
    ) -> AsyncIterator[PrefixAnswer]:
        self.num_open += 1
        try:
            self.asked.set()
            await self.may_answer.wait()
            if self.answer is None:
                count = len(hashes)
                ticket = self._source.exporter.issue(
                    "q", first_block * BLOCK, count * BLOCK, list(range(count))
                )
                self.answer = PrefixAnswer(query_id="q", num_blocks=count, ticket=ticket)
            yield self.answer
        finally:
            self.num_open -= 1

    async def pull(self, *_: object) -> None:
        self.pulling.set()
        await self.may_arrive.wait()
        if self.failure is not None:
            raise self.failure


class ScriptedSources:
    """Several of them, in place of the sessions and of the puller."""

    def __init__(self, sources: Sequence[ScriptedSource]) -> None:
        self._sources = {source.peer.incarnation: source for source in sources}

    async def get(self, peer: NodeAddress) -> ScriptedSource:
        return self._sources[peer.incarnation]

    def opened(self, _: NodeAddress) -> None:
        return None

    def has_failed(self, _: NodeAddress) -> bool:
        return False

    async def pull(self, link: ScriptedSource, *_: object) -> None:
        await link.pull()


@pytest.mark.parametrize("phase", ["asked", "pulling"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_nothing_is_held_after_an_end_in_any_phase(phase: str, how: str) -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        puller.compute(PROMPT[:8])
        scripted = ScriptedSource(puller, source)
        if phase == "pulling":
            scripted.may_answer.set()
        task = asyncio.create_task(scripted.fetcher.fetch(puller.prefix(), [scripted.hint]))
        await getattr(scripted, phase).wait()
        assert puller.pool.num_free < NUM_BLOCKS
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            leap(WITHIN_S)
            await task
            assert scripted.fetcher.statistics.timed_out == 1
        assert puller.pool.num_free == NUM_BLOCKS
        assert puller.num_cached_tokens() == 8
        assert scripted.num_open == 0
        assert not scripted.fetcher._fetching
        assert scripted.fetcher._filling.num_blocks == 0


async def test_no_source_is_waited_for_much_longer_than_computing_takes() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        scripted = ScriptedSource(puller, source, "auto", timeout_s=3600)
        steps_take(puller, 0.05)
        async with asyncio.timeout(30):
            await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
        assert scripted.asked.is_set()
        assert scripted.fetcher.statistics.timed_out == 1


@pytest.mark.parametrize("what", ["never asked", "asked"])
async def test_a_source_that_is_too_slow_is_learned_from(what: str) -> None:
    """The next prompt does not wait for it, if what it waited for is known to be slow."""
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        scripted = ScriptedSource(puller, source, "auto", timeout_s=3600)
        scripted.is_open = True
        steps_take(puller, 0.05)
        if what == "asked":
            await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
            assert scripted.fetcher.statistics.timed_out == 1
        scripted.asked.clear()
        await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
        assert scripted.asked.is_set() == (what == "never asked")
        assert scripted.fetcher.statistics.declined == (what == "asked")
        for _ in range(300):  # what is declined has its chance again
            if not scripted.asked.is_set():
                await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
        assert scripted.asked.is_set()


async def test_a_network_that_is_known_to_be_slow_has_longer() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        scripted = ScriptedSource(puller, source, "auto", timeout_s=0.02)
        scripted.is_open = True
        scripted.may_answer.set()
        steps_take(puller, 1e4)
        puller.parts.pull_costs.observe_pull(scripted.transport, 1 << 12, 8.0)
        asyncio.get_running_loop().call_later(0.1, scripted.may_arrive.set)
        await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
        assert scripted.fetcher.statistics.timed_out == 0
        assert len(puller.pool.match_prefix(puller.prefix().hashes)) == 12


async def test_patience_is_for_what_is_on_offer(caplog: pytest.LogCaptureFixture) -> None:
    """Not for all of the prompt, of which the source has a small part."""
    puller, source = PrefixNode("d"), PrefixNode("p")
    prompt, costs = list(range(NUM_BLOCKS * BLOCK)), puller.parts.pull_costs
    async with started(puller, source):
        scripted = ScriptedSource(puller, source, "auto", timeout_s=3600)
        costs.perf.costs = StepCosts(knot_tokens=[1, 1000], knot_s=[0.001, 1.0])
        expected_s = patience_s(costs.forecast("", 0, scripted.hint.num_tokens))
        with caplog.at_level(logging.INFO):
            await scripted.fetcher.fetch(puller.prefix(prompt), [scripted.hint])
        assert f"not fetched within {expected_s:.3f} s" in caplog.text


async def test_behind_a_source_that_hangs_the_next_one_is_asked() -> None:
    puller, first, second = PrefixNode("d"), PrefixNode("p0"), PrefixNode("p1")
    async with started(puller, first, second):
        hanging, answering = ScriptedSource(puller, first), ScriptedSource(puller, second)
        answering.may_answer.set()
        answering.may_arrive.set()
        sessions = ScriptedSources([hanging, answering])
        fetcher = made_fetcher(
            replace(puller.parts, sessions=sessions, puller=sessions),  # type: ignore[arg-type]
            "always",
            timeout_s=WITHIN_S,
        )
        hints = [hanging.hint, answering.hint]
        fetching = asyncio.create_task(fetcher.fetch(puller.prefix(), hints))
        await hanging.asked.wait()
        leap(WITHIN_S / 2)
        await fetching
        assert len(puller.pool.match_prefix(puller.prefix().hashes)) == 12
        statistics = fetcher.statistics
        assert (statistics.failed, statistics.replanned, statistics.timed_out) == (1, 1, 0)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_waits_for_a_fetch_that_is_given_up_fetches(how: str) -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        scripted = ScriptedSource(puller, source)
        fetcher = scripted.fetcher
        first = asyncio.create_task(fetcher.fetch(puller.prefix(), [scripted.hint]))
        await scripted.asked.wait()
        fetcher._timeout_s = 3 * WITHIN_S  # the others are more patient
        others = [
            asyncio.create_task(fetcher.fetch(puller.prefix(), [scripted.hint])) for _ in range(2)
        ]
        await asyncio.sleep(0)
        scripted.asked.clear()
        if how == "cancel":
            first.cancel()
        else:
            leap(WITHIN_S)
        await asyncio.gather(first, return_exceptions=True)
        async with asyncio.timeout(30):
            await scripted.asked.wait()
            assert scripted.num_open == 1
            scripted.may_answer.set()
            scripted.may_arrive.set()
            await asyncio.gather(*others)
        assert len(puller.pool.match_prefix(puller.prefix().hashes)) == 12
        assert fetcher.statistics.tokens == 48


async def test_what_is_here_behind_a_gap_is_not_fetched_again() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    other = PrefixNode("p1")
    async with started(puller, source, other):
        puller.compute(PROMPT)
        hashes = puller.prefix().hashes
        (gap,) = puller.pool.take_prefix(hashes[3:4])
        kept = puller.pool.take_prefix(hashes[:3]) + puller.pool.take_prefix(hashes[4:])
        puller.pool.release([gap])
        puller.pool.release(puller.pool.allocate(puller.pool.num_free))
        puller.pool.release(kept)
        assert puller.num_cached_tokens() == 12
        source.compute(PROMPT[:16])
        other.compute(PROMPT)
        sources = [source.source_for(puller, 16), other.source_for(puller, 48)]
        await puller.fetcher.fetch(puller.prefix(), sources)
        assert puller.num_cached_tokens() == 48
        assert puller.fetcher.statistics.tokens == 4
        assert other.exports.statistics.queries == 0


@pytest.mark.parametrize(
    "failure", [PeerLost("gone in mid-pull"), CorruptTransfer("wrong bytes, twice")]
)
async def test_a_pull_that_fails_publishes_nothing(failure: Exception) -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        scripted = ScriptedSource(puller, source)
        scripted.may_answer.set()
        scripted.may_arrive.set()
        scripted.failure = failure
        await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
        assert puller.pool.num_cached == 0
        assert scripted.fetcher.statistics.failed == 1


@pytest.mark.parametrize("kind", ["other tokens", "more than was asked", "garbage"])
async def test_an_answer_that_does_not_fit_the_question_is_refused(kind: str) -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        scripted = ScriptedSource(puller, source)
        scripted.may_answer.set()
        scripted.may_arrive.set()
        issue = source.exporter.issue
        ticket, count = {
            "other tokens": (issue("q", 4, 12 * BLOCK, list(range(12))), 12),
            "more than was asked": (issue("q", 0, 13 * BLOCK, list(range(13))), 13),
            "garbage": (b"garbage", 12),
        }[kind]
        scripted.answer = PrefixAnswer(query_id="q", num_blocks=count, ticket=ticket)
        await scripted.fetcher.fetch(puller.prefix(), [scripted.hint])
        assert not scripted.pulling.is_set()
        assert scripted.fetcher.statistics.failed == 1
        assert puller.pool.num_cached == 0


async def test_a_puller_that_hangs_up_lets_go_of_everything() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        session = await puller.sessions.get(source.source_for(puller, 48).node)
        async with session.prefix(0, puller.prefix().hashes) as answer:
            assert answer.num_blocks == 12
            assert source.exports.num_held_blocks == 12
            await puller.sessions.close()
            await source.assert_baseline()


async def test_a_source_that_dies_while_it_is_asked() -> None:
    puller, source = PrefixNode("d"), PrefixNode("p")
    async with started(puller, source):
        source.compute(PROMPT)
        source.exports.take = lambda _: 1 / 0  # type: ignore[assignment]
        await puller.sessions.get(source.source_for(puller, 48).node)
        fetch = asyncio.create_task(
            puller.fetcher.fetch(puller.prefix(), [source.source_for(puller, 48)])
        )
        await until(lambda: fetch.done())
        await fetch
        assert puller.fetcher.statistics.failed == 1
