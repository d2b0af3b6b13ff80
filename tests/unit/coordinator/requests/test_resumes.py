"""Requests whose nodes are lost or fail: they go on elsewhere, and clients see a gap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.requests.resumes import BACK_OFF_S, MOST_ATTEMPTS, MOST_PER_NODE
from coordinator.requests.running import RunningRequest
from pdserve.node.legs import request_of
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    FinishReason,
    LegFailed,
    NodeRole,
    NodeState,
    PrefillLeg,
    Prompt,
    SamplingParams,
    Slo,
    TokenEvent,
)
from pdserve.settings.config import Mode
from pdserve.shared.errors import NodeLost, PeerLost, RequestQuarantined, StaleTicket
from pdserve.shared.pooling import Pooling
from tests.fakes.members import heard, join, output, report
from tests.unit.coordinator.requests.test_flow import Nodes, sent, token

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
RESUME_S = 30.0  # of `made_flow`


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(max_inflight=100)
    yield nodes
    assert nodes.flow.num_inflight == 0
    assert not nodes.flow.resumes._troubles


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def legs(member: Member) -> list[PrefillLeg | DecodeLeg]:
    """The legs that a node was sent since the last look."""
    await settle()
    return [m for m in sent(member) if isinstance(m, PrefillLeg | DecodeLeg)]


async def leg(member: Member) -> PrefillLeg | DecodeLeg:
    (one,) = await legs(member)
    return one


async def decode_leg(member: Member) -> DecodeLeg:
    one = await leg(member)
    assert isinstance(one, DecodeLeg)
    return one


def fail(nodes: Nodes, member: Member, request_id: str, code: str) -> None:
    nodes.flow.leg_failed(LegFailed(request_id=request_id, code=code, message="it was"), member)


def further(nodes: Nodes, member: Member, request_id: str, begin: int, end: int = 4) -> None:
    """Tokens from index `begin` on; the last of 4 ends the request."""
    nodes.say(member, *(token(i, last=i == 3, request_id=request_id) for i in range(begin, end)))


# ---- going on ----------------------------------------------------------------------------------


async def test_a_stream_goes_on_after_its_last_token(nodes: Nodes) -> None:
    prefill, first = nodes.join("p", PREFILL), nodes.join("d1", DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    nodes.say(first, token(1))
    second = nodes.join("d2", DECODE)
    nodes.registry.remove(first)
    again = await decode_leg(second)
    assert (again.request_id, again.source) == ("r~1", None)
    assert (again.prompt.token_ids, again.output_token_ids) == ([1, 2, 3], [100, 101])
    assert running.route.decode_node == "d2"
    nodes.say(first, token(2))  # under way when the node was lost: of a request that is gone
    further(nodes, second, "r~1", 2)
    assert await output(running) == [100, 101, 102, 103]
    gap = nodes.metrics.registry.get_sample_value("pdserve_request_interruption_seconds_count")
    assert gap == 1


async def test_where_it_goes_on_its_prediction_and_what_came_of_guesses_are_known(
    nodes: Nodes,
) -> None:
    prefill, first = nodes.join("p", PREFILL), nodes.join("d1", DECODE)
    running = nodes.start(max_tokens=9, prediction=[7, 8])
    assert (await decode_leg(first)).prediction == [7, 8]
    nodes.say(prefill, token(0))
    nodes.say(first, replace(token(1), refused=3))
    nodes.say(first, replace(token(2), token_ids=[102, 103], accepted=1, refused=2))
    second = nodes.join("d2", DECODE)
    nodes.registry.remove(first)
    again = await decode_leg(second)
    assert again.output_token_ids == [100, 101, 102, 103]
    assert (again.prediction, again.accepted, again.refused) == ([7, 8], 1, 5)
    running.cancel("the test is over")


async def test_phases_that_a_stream_does_not_have_where_it_resumes_are_not_counted(
    nodes: Nodes,
) -> None:
    """They used to count as phases of 0 s."""
    nodes.join("p", PREFILL)
    first = nodes.join("d1", DECODE)
    running = nodes.start()
    nodes.say(first, token(0), token(1))
    second = nodes.join("d2", DECODE)
    nodes.registry.remove(first)
    resumed = request_of(await decode_leg(second), 1.0)
    resumed.lifecycle.scheduled_s, resumed.lifecycle.finished_s = 1.25, 2.0  # as engines do
    further(nodes, second, "r~1", 2, 3)
    end = token(3, last=True, request_id="r~1")
    nodes.say(second, replace(end, times=resumed.lifecycle.phase_times()))
    assert await output(running) == [100, 101, 102, 103]
    counts = {
        phase: nodes.metrics.registry.get_sample_value(
            f"pdserve_request_{phase}_time_seconds_count"
        )
        for phase in ("queue", "prefill", "decode")
    }
    assert counts == {"queue": 1, "prefill": 0, "decode": 0}


async def test_what_fails_is_counted_for_the_revision_that_failed(nodes: Nodes) -> None:
    prefill = join(nodes.registry, "p1", PREFILL, revision="new")
    first = join(nodes.registry, "d1", DECODE, revision="new")
    running = nodes.start()
    nodes.say(prefill, token(0))
    nodes.say(first, token(1))
    second = join(nodes.registry, "d2", DECODE, revision="old")
    join(nodes.registry, "p2", PREFILL, revision="old")
    nodes.registry.remove(first)
    await decode_leg(second)
    further(nodes, second, "r~1", 2)
    assert await output(running) == [100, 101, 102, 103]
    counted = {
        (sample.labels["revision"], sample.labels["outcome"]): sample.value
        for metric in nodes.metrics.revision_requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert counted == {("new", "node_lost"): 1, ("old", "ok"): 1}
    for latency in (nodes.metrics.revision_ttft, nodes.metrics.revision_tpot):
        samples = next(iter(latency.collect())).samples
        seen = {s.labels["revision"]: s.value for s in samples if s.name.endswith("_count")}
        assert seen == {"old": 1}, "of the nodes that ended it"


async def test_a_prompt_without_token_one_is_sent_again(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p1", PREFILL), nodes.join("d", DECODE)
    running = nodes.start()
    sent(decode)
    other = nodes.join("p2", PREFILL)
    nodes.registry.remove(prefill)
    again = await leg(other)
    assert isinstance(again, PrefillLeg)
    cancelled, decodes = sent(decode)
    assert cancelled == CancelLeg(request_id="r", reason=cancelled.reason)  # type: ignore[attr-defined]
    assert isinstance(decodes, DecodeLeg)
    assert again.request_id == decodes.request_id == "r~1"
    nodes.say(other, token(0, request_id="r~1"))
    further(nodes, decode, "r~1", 1)
    assert await output(running) == [100, 101, 102, 103]


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "adaptive"])
async def test_an_embedding_is_made_elsewhere(mode: str) -> None:
    nodes = Nodes(mode=mode)  # type: ignore[arg-type]
    role = PREFILL if mode == "disaggregated" else DECODE
    members = [nodes.join(name, role) for name in ("a", "b")]
    sampling = SamplingParams(max_tokens=0, pooling=Pooling.LAST)
    running = nodes.flow.start(
        GenerationRequest(request_id="r", prompt=Prompt([1, 2, 3]), sampling=sampling)
    )
    (busy,) = [m for m in members if sent(m)]
    nodes.registry.remove(busy)
    (other,) = [m for m in members if m is not busy]
    again = await leg(other)
    end = TokenEvent(
        request_id=again.request_id,
        index=0,
        token_ids=[],
        finish_reason=FinishReason.LENGTH,
        embedding=b"1234",
    )
    nodes.say(other, end)
    assert [event.embedding for event in await heard(running)] == [b"1234"]


@pytest.mark.parametrize("code", ["stale_ticket", "out_of_blocks", "no_node_available"])
async def test_what_is_the_nodes_fault_is_not_the_requests_end(nodes: Nodes, code: str) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    sent(decode)
    fail(nodes, decode, "r", code)
    again = await decode_leg(decode)
    assert again.output_token_ids == [100]
    fail(nodes, prefill, "r", code)  # of the former attempt
    further(nodes, decode, again.request_id, 1)
    assert await output(running) == [100, 101, 102, 103]


async def test_scores_of_the_prompt_are_not_asked_for_again(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.flow.start(
        GenerationRequest(
            request_id="r",
            prompt=Prompt([1, 2, 3]),
            sampling=SamplingParams(max_tokens=4, prompt_logprobs=1, seed=7),
        )
    )
    nodes.say(prefill, token(0))
    fail(nodes, decode, "r", StaleTicket.code)
    again = (await legs(decode))[-1]
    assert (again.sampling.prompt_logprobs, again.sampling.seed) == (None, 7)
    running.cancel("done")


async def test_siblings_without_token_one_are_sent_again_together(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p1", PREFILL), nodes.join("d", DECODE)
    names = ["r", "s"]
    running = nodes.flow.start_siblings(
        [
            GenerationRequest(
                request_id=name,
                prompt=Prompt([1]),
                sampling=SamplingParams(max_tokens=4, seed=seed),
            )
            for seed, name in enumerate(names)
        ]
    )
    sent(decode)
    other = nodes.join("p2", PREFILL)
    nodes.registry.remove(prefill)
    again = await leg(other)
    assert isinstance(again, PrefillLeg)
    assert again.request_ids == ["r~1", "s~1"]
    nodes.say(other, *(token(0, request_id=name) for name in again.request_ids))
    for answer, request_id in zip(running, again.request_ids, strict=True):
        further(nodes, decode, request_id, 1)
        assert await output(answer) == [100, 101, 102, 103]


async def test_a_sibling_that_waits_by_itself_is_not_sent_with_the_others(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p1", PREFILL), nodes.join("d", DECODE)
    first, second = nodes.flow.start_siblings(
        [
            GenerationRequest(
                request_id=name, prompt=Prompt([1]), sampling=SamplingParams(max_tokens=2)
            )
            for name in "rs"
        ]
    )
    sent(prefill), sent(decode)
    fail(nodes, decode, "s", StaleTicket.code)
    nodes.say(prefill, token(0))  # with which siblings begin that have not begun
    assert [leg.request_id for leg in await legs(prefill)] == ["s~1"]
    assert [leg.request_id for leg in await legs(decode)] == ["s~1"]
    nodes.say(prefill, token(0, request_id="s~1"))
    for request_id in ("r", "s~1"):
        nodes.say(decode, token(1, last=True, request_id=request_id))
    assert [await output(first), await output(second)] == [[100, 101], [100, 101]]


async def test_a_sibling_that_cannot_follow_now_follows_later() -> None:
    nodes = Nodes(mode="colocated")
    member = nodes.join("d", DECODE)
    first, second = nodes.flow.start_siblings(
        [
            GenerationRequest(
                request_id=name, prompt=Prompt([1]), sampling=SamplingParams(max_tokens=1)
            )
            for name in "rs"
        ]
    )
    report(nodes.registry, member, DECODE, state=NodeState.DRAINING)
    nodes.say(member, token(0, last=True))
    sent(member)
    report(nodes.registry, member, DECODE)
    assert (await leg(member)).request_id == "s"
    nodes.say(member, token(0, last=True, request_id="s"))
    assert [await output(first), await output(second)] == [[100], [100]]


# ---- waiting for a node ------------------------------------------------------------------------


async def test_without_a_node_it_waits_for_one(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    nodes.registry.remove(decode)
    await settle()
    assert running.dispatch is None
    back = nodes.join("d", DECODE, life="2", state=NodeState.LOADING)
    assert await legs(back) == []
    report(nodes.registry, back, DECODE)
    again = await decode_leg(back)
    further(nodes, back, again.request_id, 1)
    assert await output(running) == [100, 101, 102, 103]


async def test_it_does_not_wait_for_ever(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    nodes.registry.remove(decode)
    nodes.clock.advance(RESUME_S + 1)
    report(nodes.registry, prefill, PREFILL)
    with pytest.raises(NodeLost, match="generated the answer is gone, and no other took"):
        await output(running)


async def test_time_on_a_node_that_does_nothing_is_no_waiting_for_one(nodes: Nodes) -> None:
    """Such as one whose first step is stuck."""
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE, life="0")
    running = nodes.start()
    nodes.say(prefill, token(0))
    for life in ("1", "2"):
        nodes.registry.remove(decode)
        await settle()
        nodes.clock.advance(10.0)
        report(nodes.registry, prefill, PREFILL)
        decode = nodes.join("d", DECODE, life=life)
        again = await decode_leg(decode)
        nodes.clock.advance(15.0)
    assert nodes.clock.now() - 1000.0 > RESUME_S
    further(nodes, decode, again.request_id, 1)
    assert await output(running) == [100, 101, 102, 103]


async def test_one_that_is_cancelled_meanwhile_is_not_sent(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    nodes.registry.remove(decode)
    await settle()
    running.cancel("the client has gone")
    assert await legs(nodes.join("d", DECODE, life="2")) == []


async def test_a_node_is_sent_a_few_at_a_time_the_most_urgent_first(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d1", DECODE)
    names = [str(i) for i in range(30)]
    for name in names:
        slo = Slo(name="x", tpot_s=0.05) if name == "29" else Slo()
        nodes.start(name, slo=slo)
        nodes.say(prefill, token(0, request_id=name))
    other = nodes.join("d2", DECODE)
    nodes.registry.remove(decode)
    sent_first = await legs(other)
    assert len(sent_first) == 2 * MOST_PER_NODE  # two nodes are ready
    assert sent_first[0].request_id == "29~1"
    further(nodes, other, "29~1", 1, 2)
    assert len(await legs(other)) == 1
    nodes.registry.remove(prefill)
    for running in list(nodes.flow._running.values()):
        running.cancel("done")


async def test_a_request_waits_for_none_of_lower_priority_nor_ends_while_others_have_their_turn(
    nodes: Nodes,
) -> None:
    """Others may wait on their node for a place, for longer than any is to wait for a node."""
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    names = [str(number) for number in range(2 * MOST_PER_NODE + 2)]
    for name in [*names, "high"]:
        nodes.start(name, slo=Slo(name="x", priority=int(name == "high")))
        nodes.say(prefill, token(0, request_id=name))
    sent(decode)
    for name in names:
        fail(nodes, decode, name, PeerLost.code)
    assert len(await legs(decode)) == 2 * MOST_PER_NODE
    fail(nodes, decode, "high", PeerLost.code)
    assert (await leg(decode)).request_id == "high~1"
    nodes.clock.advance(RESUME_S + 1)
    report(nodes.registry, prefill, PREFILL)
    for name in ("high", *names[:2]):
        further(nodes, decode, f"{name}~1", 1)
        assert len(await legs(decode)) == (name != "high")
    for running in list(nodes.flow._running.values()):
        running.cancel("done")


# ---- what goes wrong again and again -----------------------------------------------------------


async def test_attempts_are_counted_from_the_last_token(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.start()
    nodes.say(prefill, token(0))
    sent(decode)
    request_id = "r"
    for _ in range(MOST_ATTEMPTS):
        fail(nodes, decode, request_id, StaleTicket.code)
        request_id = (await after_back_off(nodes, decode)).request_id
    nodes.say(decode, token(1, request_id=request_id))
    for _ in range(MOST_ATTEMPTS):
        fail(nodes, decode, request_id, StaleTicket.code)
        request_id = (await after_back_off(nodes, decode)).request_id
    fail(nodes, decode, request_id, StaleTicket.code)
    with pytest.raises(StaleTicket, match="could not be moved"):
        await output(running)


async def after_back_off(nodes: Nodes, decode: Member) -> DecodeLeg:
    nodes.clock.advance(4.1)
    nodes.flow.resumes.look()
    return await decode_leg(decode)


async def test_who_fails_at_once_again_is_sent_later_each_time(nodes: Nodes) -> None:
    """Its node, or the one that it pulls from, may be gone without anybody knowing so far."""
    nodes.join("p", PREFILL)
    decode = nodes.join("d", DECODE)
    running = nodes.start()
    sent(decode)
    fail(nodes, decode, "r", PeerLost.code)
    assert (await decode_leg(decode)).request_id == "r~1", "the first time at once"
    waited_s = []
    for attempt in (1, 2, 3):
        fail(nodes, decode, f"r~{attempt}", PeerLost.code)
        since_s = nodes.clock.now()
        while not (again := await legs(decode)):
            nodes.clock.advance(0.01)
            nodes.flow.resumes.look()
        assert [one.request_id for one in again] == [f"r~{attempt + 1}"]
        waited_s.append(nodes.clock.now() - since_s)
    assert waited_s == pytest.approx([BACK_OFF_S, 2 * BACK_OFF_S, 4 * BACK_OFF_S], abs=0.02)
    running.cancel("done")


async def poisoned(nodes: Nodes, running: RunningRequest, *, silently: bool = False) -> int:
    """Every node that has the request dies. Returns how many it took."""
    for count in range(1, 10):
        await settle()
        if silently:
            nodes.clock.advance(4.1)  # what has failed again is sent later
            nodes.flow.resumes.look()
            await settle()
        dispatch = running.dispatch
        if dispatch is None:
            return count - 1
        member = dispatch.decode
        assert member is not None
        if silently:
            nodes.registry.silent(member, 2.0)
        nodes.registry.remove(member)
    return 10


async def test_who_brings_nodes_down_is_quarantined() -> None:
    nodes = Nodes(mode="colocated")
    for i in range(6):
        nodes.join(f"d{i}", DECODE, life=str(i))
    running = nodes.start()
    assert await poisoned(nodes, running) == 3
    with pytest.raises(RequestQuarantined, match="3 nodes have failed"):
        await output(running)
    with pytest.raises(RequestQuarantined, match="for another 600 s"):
        nodes.start("again")
    nodes.start("of another", slo=Slo(tenant="bob")).cancel("a tenant's quarantine is its own")
    nodes.clock.advance(601.0)
    nodes.start("later").cancel("done")


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_nodes_that_fall_silent_accuse_nobody(mode: Mode) -> None:
    """A host that stands still, or is cut off, takes all of its nodes, one after the other."""
    nodes = Nodes(mode=mode)
    nodes.join("p", PREFILL)
    for i in range(4):
        nodes.join(f"d{i}", DECODE, life=str(i))
    running = nodes.start()
    assert await poisoned(nodes, running, silently=True) == 4
    last = nodes.join("d", DECODE, life="back")
    assert [one.request_id for one in await legs(last)] == ["r~4"], "it waited for a node"
    nodes.start("the same prompt").cancel("is taken")
    running.cancel("done")


async def test_suspects_are_tried_one_at_a_time_and_who_is_innocent_goes_on() -> None:
    """Two nodes die of one of two requests; the other only happened to be there."""
    nodes = Nodes(mode="colocated")
    member = nodes.join("d0", DECODE, life="0")
    innocent = nodes.start("innocent")
    guilty = nodes.flow.start(
        GenerationRequest(
            request_id="guilty", prompt=Prompt([6, 6, 6]), sampling=SamplingParams(max_tokens=4)
        )
    )
    for life in (1, 2):
        successor = nodes.join(f"d{life}", DECODE, life=str(life))
        nodes.registry.remove(member)
        await settle()
        member = successor
    on_trial = [leg.request_id for leg in await legs(member)]
    assert on_trial == ["innocent~2"]
    nodes.say(member, token(0, request_id="innocent~2"))
    assert (await leg(member)).request_id == "guilty~2"
    last = nodes.join("d3", DECODE, life="3")
    nodes.registry.remove(member)
    with pytest.raises(RequestQuarantined):
        await output(guilty)
    assert (await decode_leg(last)).output_token_ids == [100]
    further(nodes, last, "innocent~3", 1)
    assert await output(innocent) == [100, 101, 102, 103]


async def test_a_decode_node_that_knows_first_does_not_hide_who_brought_a_prefill_node_down() -> (
    None
):
    nodes = Nodes()
    decode = nodes.join("d", DECODE)
    prefill = nodes.join("p", PREFILL, life="0")
    running = nodes.start()
    for attempt in range(3):
        await settle()
        assert running.dispatch is not None
        assert running.dispatch.prefill is prefill
        successor = nodes.join(f"p{attempt}", PREFILL, life=str(attempt + 1))
        fail(nodes, decode, running.request.request_id, PeerLost.code)
        nodes.registry.remove(prefill)
        prefill = successor
        nodes.clock.advance(4.1)  # what has failed again is sent later
        nodes.flow.resumes.look()
    with pytest.raises(RequestQuarantined, match="3 nodes have failed"):
        await output(running)


async def test_a_node_that_attaches_anew_had_not_died() -> None:
    """Its stream was cut: no request did that."""
    nodes = Nodes(mode="colocated")
    member = nodes.join("d", DECODE)
    running = nodes.start()
    for _ in range(MOST_ATTEMPTS - 1):
        nodes.registry.remove(member)
        member = nodes.join("d", DECODE)
    await settle()
    assert not nodes.flow.resumes._is_suspect("r")
    running.cancel("done")


async def test_a_node_of_the_pool_that_is_loading_is_waited_for() -> None:
    """As where a supervisor starts it again; only the request's own deadline ends the wait."""
    nodes = Nodes()
    nodes.join("p", PREFILL)
    nodes.registry.remove(nodes.join("d", DECODE))
    first = nodes.join("d", DECODE, life="1")
    running = nodes.start()
    nodes.registry.remove(first)
    again = nodes.join("d", DECODE, life="2", state=NodeState.LOADING)
    for _ in range(3):
        nodes.clock.advance(RESUME_S)
        nodes.flow.resumes.look()
        await settle()
        assert not running.has_ended
    report(nodes.registry, again, DECODE)
    assert [one.request_id for one in await legs(again)] == ["r~1"]
    nodes.registry.remove(again)
    nodes.join("p2", PREFILL, state=NodeState.LOADING)  # of the other pool, which has one
    await settle()
    nodes.clock.advance(RESUME_S)
    nodes.flow.resumes.look()
    await settle()
    with pytest.raises(NodeLost):
        await output(running)
