"""Several answers to one prompt where it is prefilled: computed once, handed off n times."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.ticket import read_ticket
from pdserve.protocol import (
    Announcement,
    HandoffEnded,
    HandoffRecord,
    LegFailed,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    Sibling,
)
from pdserve.settings.config import EngineConfig
from pdserve.shared.errors import GrammarFailed
from tests.matrix import examples
from tests.unit.node.one_node import BLOCK, Bench

NAMES = ["p", "p-1", "p-2", "p-3"]
PROMPT = 70  # tokens: more than one step computes, and no whole blocks
NUM_PROMPT_BLOCKS = -(-PROMPT // BLOCK)


class Fan(Bench):
    """A prefill node with one prompt and its answers, each with a decode node of its own."""

    def __init__(self) -> None:
        super().__init__(NodeRole.PREFILL, engine=EngineConfig(token_budget=32))
        self.heard: dict[str, list[msgspec.Struct]] = defaultdict(list)
        self.hears = {name: partial(self._hear, name) for name in NAMES}
        self.over: set[str] = set()  # settled, given up or cancelled
        self.num_computed = 0

    def begin(self, max_tokens: int = 4) -> None:
        self.prefill("p", PROMPT, siblings=NAMES[1:], is_heard=False, max_tokens=max_tokens)

    def subscribe(self, name: str) -> None:
        """The last one's decode node has another one's KV on its way already."""
        if name not in self.over:
            at_end = name == NAMES[-1]
            self.services.announcer.subscribe(name, self.hears[name], at_end=at_end)

    def settle(self, name: str) -> None:
        """Everything was pulled, if there was everything."""
        if self.heard[name]:
            self.over.add(name)
            self.services.announcer.settle(name, self.hears[name], was_pulled=self.is_whole(name))

    def lose(self, name: str) -> None:
        """Its decode node dies; the coordinator, which hears of it, cancels the leg."""
        self.services.announcer.unsubscribe(name, self.hears[name])
        self.cancel(name)

    def cancel(self, name: str) -> None:
        self.over.add(name)
        self.services.cancel_leg(name, "a test")

    def is_whole(self, name: str) -> bool:
        """Whether all that a decode node needs was said, part by part and without a gap."""
        end = 0
        for message in self.heard[name]:
            if isinstance(message, Announcement) and message.is_restart:
                end = 0
            if isinstance(message, Announcement | HandoffRecord) and message.ticket:
                ticket = read_ticket(message.ticket)
                assert ticket.first_token == end
                end = ticket.end_token
            if isinstance(message, HandoffRecord):
                assert end == PROMPT
                return True
        return False

    def step_and_count(self) -> None:
        self.num_computed += sum(row.num_tokens for row in self.step())
        assert self.services.num_pinned_blocks <= NUM_PROMPT_BLOCKS, "each counts once"

    def _hear(self, name: str, message: msgspec.Struct) -> None:
        self.heard[name].append(message)


async def test_each_answer_is_handed_off_with_its_own_token_one() -> None:
    fan = Fan()
    fan.begin()
    for name in NAMES:
        fan.subscribe(name)
    while not any(isinstance(m, HandoffRecord) for m in fan.heard["p-3"]):
        fan.step_and_count()
    assert fan.num_computed == PROMPT
    assert fan.services.num_pinned_blocks == NUM_PROMPT_BLOCKS
    for i, name in enumerate(NAMES):
        assert fan.is_whole(name)
        record = fan.heard[name][-1]
        assert isinstance(record, HandoffRecord)
        assert (record.request_id, record.token_ids) == (name, [PROMPT + i])
        assert fan.link.tokens_of(name) == [PROMPT + i]
    blocks = [
        [read_ticket(m.ticket).block_ids for m in fan.heard[name] if m.ticket]  # type: ignore[attr-defined]
        for name in NAMES
    ]
    assert [len(parts) for parts in blocks] == [3, 3, 3, 1], "chunk by chunk, or all at the end"
    distinct = {block for parts in blocks for part in parts for block in part}
    assert len(distinct) == NUM_PROMPT_BLOCKS, "they are the same blocks"
    for name in NAMES:
        assert fan.services.num_pinned_blocks == NUM_PROMPT_BLOCKS, "the last one frees them"
        fan.settle(name)
    fan.check_idle()
    await fan.close()


ACTIONS: dict[str, Callable[[Fan, str], None]] = {
    "subscribe": Fan.subscribe,
    "settle": Fan.settle,
    "lose": Fan.lose,
    "cancel": Fan.cancel,
    "step": lambda fan, _: fan.step_and_count(),
}


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.sampled_from(NAMES)), max_size=30))
def test_however_they_end_the_blocks_are_free(actions: list[tuple[str, str]]) -> None:
    """In any order, before, amid and after the prefill."""

    async def scenario() -> None:
        fan = Fan()
        fan.begin()
        for action, name in actions:
            ACTIONS[action](fan, name)
        fan.run()
        for name in NAMES:
            if name not in fan.over and "p" not in fan.over:
                fan.subscribe(name)
                assert fan.is_whole(name), "others' ends are nothing to it"
                assert len(fan.link.tokens_of(name)) == 1
            fan.settle(name)
            fan.cancel(name)  # as the coordinator does, if the first one came to nothing
        fan.check_idle()
        await fan.close()

    asyncio.run(scenario())


async def test_answers_of_one_token_hand_nothing_over() -> None:
    fan = Fan()
    fan.begin(max_tokens=1)
    fan.run()
    assert [fan.link.tokens_of(name) for name in NAMES] == [[PROMPT + i] for i in range(4)]
    fan.check_idle()
    await fan.close()


@pytest.mark.parametrize("named", ["p", "p-2"])
async def test_what_fails_for_one_fails_for_all(named: str) -> None:
    fan = Fan()
    fan.begin()
    fan.subscribe("p-1")
    engine = fan.parts.engine
    rows = engine.begin_step()
    engine._fail(rows, GrammarFailed("no way on", [named]), fan.services)
    assert all(answer.is_done for row in rows for answer in row.request.answers)
    failed = [m.request_id for m in fan.link.sent if isinstance(m, LegFailed)]
    assert failed == NAMES
    (ended,) = fan.heard["p-1"]
    assert isinstance(ended, HandoffEnded)
    assert ended.code == GrammarFailed.code
    fan.check_idle()
    await fan.close()


@pytest.mark.parametrize(
    ("siblings", "max_tokens", "match"),
    [(["p-1", "p"], 4, "it is running already"), (["p-1"], 0, "several answers")],
)
async def test_a_leg_that_cannot_be_is_refused(
    siblings: list[str], max_tokens: int, match: str
) -> None:
    fan = Fan()
    fan.prefill("p", PROMPT)
    sampling = SamplingParams(max_tokens=max_tokens)
    leg = PrefillLeg(
        request_id="q",
        prompt=Prompt([1, 2]),
        sampling=sampling,
        siblings=[Sibling(request_id=name, seed=i) for i, name in enumerate(siblings)],
    )
    fan.services.start_prefill(leg, fan.link)
    (failed,) = (m for m in fan.link.sent if isinstance(m, LegFailed))
    assert failed.request_id == "q"
    assert match in failed.message
    fan.run()
    fan.check_idle()
    await fan.close()
