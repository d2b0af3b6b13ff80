"""Dispatching, ordering, failing and cancelling, with nodes that are only outboxes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import msgspec
import pytest

from coordinator.admission import Admission, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.journey import Journey
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowTimes
from coordinator.routing import Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    FinishReason,
    LegFailed,
    LoadReport,
    NodeRole,
    NodeState,
    PrefillLeg,
    Prompt,
    SamplingParams,
    Slo,
    TokenBatch,
    TokenEvent,
    TokenLogprobs,
)
from pdserve.settings.config import Mode, RouterName
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GrammarFailed,
    MalformedMessage,
    NoNodeAvailable,
    Overloaded,
    RequestCancelled,
)
from pdserve.shared.introduction import is_introduced
from tests.fakes.hellos import node_hello
from tests.fakes.members import NO_GAP, TIMES, made_flow, output, report
from tests.fakes.outbox import RecordingOutbox
from tests.matrix import matrix
from tests.waits import until


class Nodes:
    """A flow over nodes that a test plays."""

    def __init__(
        self,
        *,
        mode: Mode = "disaggregated",
        policy: RouterName = "predicted",
        max_inflight: int = 8,
        on_ended: Callable[[Journey, PromptHashes], None] = lambda journey, prompt: None,
        waits_for_nodes: bool = False,
        takes_over: bool = True,
        times: FlowTimes = TIMES,
    ) -> None:
        self._takes_over = takes_over  # whether its nodes take streams over while they run
        self.clock = ManualClock(1000.0)
        self.metrics = CoordinatorMetrics()
        self.registry = Registry()
        router = Router(self.registry, mode, policy, self.clock)
        admission = Admission(WaitingLine[RunningRequest](2), max_inflight=max_inflight)
        self.flow = made_flow(
            self.registry,
            router,
            admission,
            metrics=self.metrics,
            clock=self.clock,
            on_ended=on_ended,
            waits_for_nodes=waits_for_nodes,
            times=times,
        )

    def join(
        self,
        node_id: str,
        role: NodeRole,
        *,
        life: str = "1",
        state: NodeState = NodeState.READY,
        **fields: Any,
    ) -> Member:
        hello = node_hello(
            node_id,
            role,
            incarnation=life,
            state=state,
            introduction_key=key_of(node_id, life),
            **fields,
        )
        return self.registry.add(hello, RecordingOutbox())  # type: ignore[arg-type]

    def start(self, request_id: str = "r", max_tokens: int = 4, **fields: object) -> RunningRequest:
        running = self.flow.start(
            GenerationRequest(
                request_id=request_id,
                prompt=Prompt([1, 2, 3]),
                sampling=SamplingParams(max_tokens=max_tokens),
                **fields,  # type: ignore[arg-type]
            )
        )
        running.shuns_takeovers = not self._takes_over
        return running

    def say(self, member: Member, *events: TokenEvent) -> None:
        self.flow.tokens(TokenBatch(events=list(events)), member)


def key_of(node_id: str, life: str) -> bytes:
    return f"{node_id}@{life}".encode().ljust(32)


def sent(member: Member) -> list[msgspec.Struct]:
    """Messages to a node since the last look."""
    outbox = member.outbox
    assert isinstance(outbox, RecordingOutbox)
    messages, outbox.sent = outbox.sent, []
    return messages


def token(
    index: int,
    *,
    last: bool = False,
    request_id: str = "r",
    logprobs: Sequence[TokenLogprobs] = (),
) -> TokenEvent:
    return TokenEvent(
        request_id=request_id,
        index=index,
        token_ids=[100 + index],
        logprobs=list(logprobs),
        finish_reason=FinishReason.LENGTH if last else None,
    )


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    assert nodes.flow.num_inflight == 0


async def test_what_a_request_may_hold_is_known_while_all_nodes_sleep(nodes: Nodes) -> None:
    """Though none was asked for, while there were any."""
    assert nodes.flow.max_model_len is None
    nodes.join("p1", NodeRole.PREFILL)
    known = nodes.join("d1", NodeRole.DECODE).hello.max_model_len
    for member in list(nodes.registry):
        nodes.registry.remove(member)
    assert nodes.flow.max_model_len == known


async def test_the_node_that_holds_least_bounds_every_request(nodes: Nodes) -> None:
    nodes.join("p", NodeRole.PREFILL, max_model_len=100)
    nodes.join("d", NodeRole.DECODE, max_model_len=200)
    assert nodes.flow.max_model_len == 100
    shorter = nodes.join("e", NodeRole.DECODE, max_model_len=50)
    assert nodes.flow.max_model_len == 50
    nodes.registry.remove(shorter)
    assert nodes.flow.max_model_len == 100


async def test_both_legs_are_dispatched_at_once(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    (prefill_leg,), (decode_leg,) = sent(prefill), sent(decode)
    assert isinstance(prefill_leg, PrefillLeg)
    assert prefill_leg.handoff
    assert isinstance(decode_leg, DecodeLeg)
    assert decode_leg.source == prefill.address_for(decode)
    assert (running.route.prefill_node, running.route.decode_node) == ("p", "d")
    nodes.say(prefill, token(0))
    nodes.say(decode, token(1), token(2), token(3, last=True))
    assert await output(running) == [100, 101, 102, 103]
    assert sent(prefill) == sent(decode) == []


async def test_tokens_in_columns_are_tokens_like_others(nodes: Nodes) -> None:
    nodes.join("p", NodeRole.PREFILL)
    decode = nodes.join("d", NodeRole.DECODE)
    running, other = nodes.start(), nodes.start("other")
    nodes.say(decode, token(0), token(0, request_id="other"))
    ids = ["r", "other", "gone"]
    batch = TokenBatch(request_ids=ids, indices=[1, 1, 9], token_ids=[101, 201, 301])
    nodes.flow.tokens(batch, decode)
    last = TokenBatch(
        events=[token(2, last=True)], request_ids=["other"], indices=[2], token_ids=[7]
    )
    nodes.flow.tokens(last, decode)
    nodes.say(decode, token(3, last=True, request_id="other"))
    assert await output(running) == [100, 101, 102]
    assert await output(other) == [100, 201, 7, 103]


async def test_columns_of_different_lengths_are_refused_as_a_whole(nodes: Nodes) -> None:
    nodes.join("p", NodeRole.PREFILL)
    decode = nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    batch = TokenBatch(events=[token(0)], request_ids=["r"], indices=[1], token_ids=[101, 102])
    with pytest.raises(MalformedMessage, match="differ in length"):
        nodes.flow.tokens(batch, decode)
    assert running.num_tokens == 0
    running.cancel("done")


async def test_the_decode_node_is_introduced_to_this_life_of_the_prefill_node(
    nodes: Nodes,
) -> None:
    nodes.join("p", NodeRole.PREFILL, life="7")
    decode = nodes.join("d", NodeRole.DECODE, life="9")
    running = nodes.start()
    (leg,) = sent(decode)
    assert isinstance(leg, DecodeLeg)
    assert leg.source is not None
    assert leg.source.incarnation == "7"
    shown = leg.source.introduction
    assert is_introduced(key_of("p", "7"), "7", "9", shown)
    assert not is_introduced(key_of("p", "8"), "7", "9", shown)
    assert not is_introduced(key_of("p", "7"), "7", "10", shown)
    running.cancel("done")


async def test_a_single_token_needs_no_decode_node(nodes: Nodes) -> None:
    prefill = nodes.join("p", NodeRole.PREFILL)
    nodes.join("d", NodeRole.DECODE)
    running = nodes.start(max_tokens=1)
    (leg,) = sent(prefill)
    assert isinstance(leg, PrefillLeg)
    assert not leg.handoff
    nodes.say(prefill, token(0, last=True))
    assert await output(running) == [100]


@pytest.mark.parametrize("order", matrix([(one,) for one in list(permutations(range(4)))], 8))
async def test_tokens_come_out_in_order_once(nodes: Nodes, order: tuple[int, ...]) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    events = [token(0), token(1), token(2), token(3, last=True)]
    for index in order:
        for _ in range(2):  # a repeated message changes nothing
            nodes.say(prefill if index == 0 else decode, events[index])
    assert await output(running) == [100, 101, 102, 103]


async def test_an_end_at_token_one_cancels_the_decode_leg(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    sent(decode)
    nodes.say(prefill, token(0, last=True))
    assert await output(running) == [100]
    assert [type(m) for m in sent(decode)] == [CancelLeg]


async def test_cancel_tells_both_nodes_once(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    sent(prefill), sent(decode)
    running.cancel("client disconnected")
    running.cancel("again")
    for member in (prefill, decode):
        (cancel,) = sent(member)
        assert cancel == CancelLeg(request_id="r", reason="client disconnected")
    with pytest.raises(RequestCancelled):
        await output(running)
    nodes.say(decode, token(1))  # late news of a request that is gone


async def test_a_leg_that_fails_because_of_the_request_ends_it(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    sent(prefill)
    failure = LegFailed(request_id="r", code=GrammarFailed.code, message="a dead end")
    nodes.flow.leg_failed(failure, decode)
    with pytest.raises(GrammarFailed, match="a dead end"):
        await output(running)
    assert [type(m) for m in sent(prefill)] == [CancelLeg]


async def test_losing_the_prefill_node_after_token_one_is_up_to_the_decode_node(
    nodes: Nodes,
) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    nodes.registry.remove(prefill)
    nodes.say(decode, token(1), token(2), token(3, last=True))
    assert await output(running) == [100, 101, 102, 103]


async def test_the_deadline_ends_a_request(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", NodeRole.PREFILL), nodes.join("d", NodeRole.DECODE)
    running = nodes.start(deadline_s=0.01)
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await output(running)
    assert CancelLeg in map(type, sent(prefill))
    assert CancelLeg in map(type, sent(decode))


@pytest.mark.parametrize("missing", list(NodeRole))
async def test_an_empty_pool_is_named(nodes: Nodes, missing: NodeRole) -> None:
    for role in NodeRole:
        state = NodeState.LOADING if role is missing else NodeState.READY
        nodes.join(role.name, role, state=state)
    assert not nodes.flow.is_ready()
    with pytest.raises(NoNodeAvailable, match=missing.name.lower()):
        nodes.start()


async def test_requests_wait_for_nodes_that_will_be_started() -> None:
    nodes = Nodes(waits_for_nodes=True, max_inflight=2, times=NO_GAP)
    assert nodes.flow.is_ready()
    waiting = [nodes.start("one"), nodes.start("two")]
    with pytest.raises(Overloaded, match="queue of requests that wait is full: it has 2"):
        nodes.start("three")
    prefill = nodes.join("p", NodeRole.PREFILL)
    assert sent(prefill) == []
    nodes.join("d", NodeRole.DECODE)
    await until(lambda: nodes.flow.num_on_nodes == 2)
    assert [type(message) for message in sent(prefill)] == [PrefillLeg, PrefillLeg]
    for running in waiting:
        running.cancel("enough")


async def test_a_request_waits_for_nodes_until_its_deadline() -> None:
    nodes = Nodes(waits_for_nodes=True)
    with pytest.raises(DeadlineExceeded):
        await output(nodes.start(deadline_s=0.01))
    assert nodes.flow.num_inflight == 0


@pytest.mark.parametrize("are_shared", [True, False])
async def test_that_no_node_can_become_the_model_is_told_where_none_is_its_own(
    *, are_shared: bool
) -> None:
    nodes = Nodes(waits_for_nodes=are_shared)
    running = nodes.start(wait_s=5.0)
    nodes.flow.refuse_line(7.5)
    assert running.has_ended == are_shared
    if are_shared:
        with pytest.raises(NoNodeAvailable, match="their logs say why") as caught:
            await output(running)
        assert caught.value.retry_after_s == 7.5
    running.cancel("enough")


async def test_a_request_that_cannot_fit_is_refused(nodes: Nodes) -> None:
    nodes.join("p", NodeRole.PREFILL)
    nodes.join("d", NodeRole.DECODE)
    with pytest.raises(ContextLengthExceeded, match="3 prompt tokens and max_tokens 62 make 65"):
        nodes.start(max_tokens=62)


async def test_too_many_requests_are_refused() -> None:
    nodes = Nodes(max_inflight=1)
    nodes.join("p", NodeRole.PREFILL)
    nodes.join("d", NodeRole.DECODE)
    running = nodes.start("one")
    promise = Slo(name="standard", ttft_s=10.0)
    with pytest.raises(Overloaded):
        nodes.start("two", slo=promise)
    running.cancel("room for others")
    nodes.start("three", slo=promise).cancel("done")


async def test_colocated_requests_have_one_leg(nodes: Nodes) -> None:
    nodes = Nodes(mode="colocated")
    decode = nodes.join("d", NodeRole.DECODE)
    running = nodes.start()
    (leg,) = sent(decode)
    assert isinstance(leg, DecodeLeg)
    assert leg.source is None
    nodes.say(decode, token(0), token(1), token(2), token(3, last=True))
    assert await output(running) == [100, 101, 102, 103]


async def test_the_least_loaded_of_each_pool_is_chosen() -> None:
    nodes = Nodes(policy="least-loaded")
    for name in ("p1", "p2"):
        nodes.join(name, NodeRole.PREFILL)
    busy = nodes.join("d1", NodeRole.DECODE)
    nodes.join("d2", NodeRole.DECODE)
    load = LoadReport(state=NodeState.READY, role=busy.role, running_requests=5)
    nodes.registry.report(busy, load)
    started = [nodes.start(str(i)) for i in range(4)]
    assert [r.route.prefill_node for r in started] == ["p1", "p2", "p1", "p2"]
    assert {r.route.decode_node for r in started} == {"d2"}
    for running in started:
        running.cancel("done")


async def test_a_silent_node_is_asked_for_nothing_if_there_is_another() -> None:
    """It keeps what it has, and is back as soon as something is heard of it."""
    nodes = Nodes(mode="colocated")
    late, other = (nodes.join(name, NodeRole.DECODE) for name in ("late", "other"))
    first = {name: nodes.start(name) for name in ("a", "b")}
    has = next(r for r in first.values() if r.dispatch and r.dispatch.decode is late)
    nodes.registry.silent(late, 2.0)
    further = [nodes.start(f"further {i}") for i in range(4)]
    assert {r.dispatch.decode for r in further if r.dispatch} == {other}
    assert has.dispatch is not None
    assert has.dispatch.decode is late
    nodes.registry.silent(other, 2.0)
    assert nodes.flow.is_ready(), "where all are late, they are waited for"
    last = nodes.start("last")
    nodes.registry.heard(late)
    assert nodes.start("at once").route.decode_node == "late"
    assert last.route.decode_node in ("late", "other")


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_new_request_waits_for_a_node_as_long_as_its_class_says(
    *, comes_back: bool
) -> None:
    nodes = Nodes(times=NO_GAP)
    prefill = nodes.join("p", NodeRole.PREFILL)
    with pytest.raises(NoNodeAvailable):
        nodes.start("not at all")
    running = nodes.start("r", wait_s=5.0)
    assert running.dispatch is None
    if comes_back:
        nodes.join("d", NodeRole.DECODE)
        await until(lambda: running.dispatch is not None)
        running.cancel("done")
        held = weakref.ref(running)
        del running
        gc.collect()
        assert held() is None, "it is forgotten, however long it might have waited"
    else:
        for _ in range(3):  # it is seen that there is no node
            await asyncio.sleep(0)
        nodes.clock.advance(5.0)
        report(nodes.registry, prefill, NodeRole.PREFILL)
        with pytest.raises(NoNodeAvailable, match="decode node"):
            await output(running)
    assert nodes.flow.num_inflight == 0
