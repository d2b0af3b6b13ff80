"""Requests that are refused, or wait in the coordinator; a scripted policy says which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.admission import Admission, Admit, Refuse, Wait, WaitingLine
from coordinator.admission.decisions import Awaited, Decision, PredictedTimes
from coordinator.generation import GenerationRequest, Route
from coordinator.nodes.registry import Member, Registry
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.running import RunningRequest
from coordinator.routing import Placement, Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    FinishReason,
    LegFailed,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    Slo,
    TokenBatch,
    TokenEvent,
)
from pdserve.protocol.status import PrefixStatus, WaitingClass
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    DeadlineExceeded,
    NoNodeAvailable,
    Overloaded,
    RequestCancelled,
    SloUnreachable,
)
from tests.fakes.members import NO_GAP, join, made_flow, output, report, said_to

INTERACTIVE = Slo(name="interactive", priority=2, ttft_s=2.0, tpot_s=0.1)
BATCH = Slo(name="batch")


class ScriptedAdmission(Admission[RunningRequest]):
    """Says what a test wants it to, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(WaitingLine[RunningRequest](8))
        self.has_room = True
        self.refusal: Overloaded | None = None
        self.kept: Slo | None = None  # instead of what was promised
        self.at_bound: set[str] = set()  # tenants
        self.num_free = 1000
        self.asked: list[Slo] = []
        self.told: list[tuple[object, ...]] = []

    def decide(
        self,
        slo: Slo,
        predicted: PredictedTimes,
        now_s: float,
        tpot_within_s: Callable[[float], float | None] = lambda tpot_s: None,
        num_answers: int = 1,
    ) -> Decision:
        if self.refusal is not None:
            return Refuse("ttft", self.refusal)
        return self.reconsider(slo, predicted, now_s)

    def reconsider(
        self, slo: Slo, predicted: PredictedTimes, now_s: float, num_answers: int = 1
    ) -> Admit | Wait:
        self.asked.append(slo)
        return Admit(self.kept or slo) if self.has_room else Wait()

    def fits(self, num_answers: int) -> bool:
        return num_answers <= self.num_free

    def is_at_bound(self, slo: Slo, num_answers: int) -> bool:
        return slo.tenant in self.at_bound

    def dispatched(
        self, request_id: str, slo: Slo, predicted: PredictedTimes, now_s: float
    ) -> None:
        self.told.append(("dispatched", request_id, now_s))
        self.num_free -= 1

    def first_token(self, request_id: str, now_s: float) -> None:
        self.told.append(("first token", request_id, now_s))

    def ended(self, request_id: str, now_s: float, num_tokens: int = 0) -> None:
        self.told.append(("ended", request_id, now_s, num_tokens))


class Nodes:
    """A flow over one node of each pool."""

    def __init__(self, awaited: Awaited | None = None) -> None:
        self.clock = ManualClock(1000.0)
        self.registry = Registry()
        self.metrics = CoordinatorMetrics()
        self.admission = ScriptedAdmission()
        self.router = Router(self.registry, "disaggregated", clock=self.clock)
        self.flow = made_flow(
            self.registry,
            self.router,
            self.admission,
            metrics=self.metrics,
            clock=self.clock,
            times=NO_GAP,
            waits_for_nodes=awaited is not None,
            until_awake=lambda slo, prompt: awaited,
        )
        self.prefill = join(self.registry, "p", NodeRole.PREFILL)
        self.decode = join(self.registry, "d", NodeRole.DECODE)

    def start(self, request_id: str = "r", slo: Slo = BATCH, **fields: float) -> RunningRequest:
        return self.flow.start(
            GenerationRequest(
                request_id=request_id,
                prompt=Prompt([1, 2, 3, 4, 5]),
                sampling=SamplingParams(max_tokens=2),
                slo=slo,
                **fields,  # type: ignore[arg-type]
            )
        )

    def say(self, member: Member, request_id: str, index: int) -> None:
        event = TokenEvent(
            request_id=request_id,
            index=index,
            token_ids=[index],
            finish_reason=FinishReason.LENGTH if index == 1 else None,
        )
        self.flow.tokens(TokenBatch(events=[event]), member)

    def finish(self, request_id: str) -> None:
        self.say(self.prefill, request_id, 0)
        self.say(self.decode, request_id, 1)

    def dispatched(self) -> list[str]:
        """In this order."""
        return [leg.request_id for leg in said_to(self.prefill) if isinstance(leg, PrefillLeg)]

    def value(self, sample: str) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        return next((float(x.split()[-1]) for x in lines if x.startswith(sample)), 0.0)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


async def settled() -> None:
    """What was to happen soon has happened."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_refused_leaves_no_trace(nodes: Nodes) -> None:
    nodes.admission.refusal = SloUnreachable("too slow", 3.0)
    with pytest.raises(SloUnreachable) as refusal:
        nodes.start(slo=INTERACTIVE)
    assert refusal.value.retry_after_s == 3.0
    assert nodes.flow.num_inflight == 0
    assert said_to(nodes.prefill) == said_to(nodes.decode) == []
    assert nodes.admission.told == []
    assert nodes.value('pdserve_requests_refused_total{reason="ttft",slo_class="interactive"}') == 1


async def test_what_waits_is_on_no_node_until_there_is_room(nodes: Nodes) -> None:
    nodes.admission.has_room = False
    running = nodes.start()
    assert running.route == Route(None, None)
    assert nodes.dispatched() == []
    assert nodes.value("pdserve_waiting_requests") == 1
    status = nodes.flow.status()
    assert (status.inflight, status.waiting) == (0, 1)
    nodes.clock.advance(3.0)
    assert nodes.value('pdserve_slo_waiting_requests{slo_class="batch"}') == 1
    assert nodes.value("pdserve_waiting_payers") == 1
    waiting = WaitingClass(slo_class="batch", requests=1, tenants=1, oldest_s=3.0)
    assert nodes.flow.status().waiting_by_class == [waiting]
    nodes.admission.has_room = True
    report(nodes.registry, nodes.decode, NodeRole.DECODE)
    await settled()
    assert nodes.dispatched() == ["r"]
    assert running.route == Route("p", "d", "r")
    assert (nodes.flow.status().inflight, nodes.flow.status().waiting) == (1, 0)
    assert nodes.value('pdserve_slo_waited_seconds_sum{slo_class="batch"}') == 3.0
    nodes.finish("r")
    assert await output(running) == [0, 1]
    assert nodes.flow.num_inflight == 0


@pytest.mark.parametrize("event", ["first token", "finished", "failed", "cancelled", "report"])
async def test_the_line_is_looked_at_when_something_has_changed(nodes: Nodes, event: str) -> None:
    first = nodes.start("first")
    if event == "finished":
        nodes.say(nodes.prefill, "first", 0)
    nodes.admission.has_room = False
    nodes.start("second")
    await settled()
    assert nodes.dispatched() == ["first"]
    nodes.admission.has_room = True
    await settled()
    assert nodes.dispatched() == ["first"]  # nobody polls
    match event:
        case "first token":
            nodes.say(nodes.prefill, "first", 0)
        case "finished":
            nodes.say(nodes.decode, "first", 1)
        case "failed":
            nodes.flow.leg_failed(
                LegFailed(request_id="first", code="grammar_failed", message=""), nodes.decode
            )
        case "cancelled":
            first.cancel("done")
        case "report":
            report(nodes.registry, nodes.prefill, NodeRole.PREFILL)
    await settled()
    assert nodes.dispatched() == ["first", "second"]


async def test_first_come_first_served_as_long_as_there_is_room(nodes: Nodes) -> None:
    nodes.admission.has_room = False
    for name in "abc":
        nodes.start(name)
    nodes.admission.has_room = True
    report(nodes.registry, nodes.decode, NodeRole.DECODE)
    await settled()
    assert nodes.dispatched() == ["a", "b", "c"]


async def test_who_waits_for_its_own_tenant_alone_delays_no_other(nodes: Nodes) -> None:
    """Whatever its priority, which clients choose."""
    nodes.admission.has_room = False
    nodes.start("flood", Slo(name="batch", tenant="mallory", priority=9))
    nodes.start("other", Slo(name="batch", tenant="alice"))
    nodes.admission.has_room, nodes.admission.at_bound = True, {"mallory"}
    report(nodes.registry, nodes.decode, NodeRole.DECODE)
    await settled()
    assert nodes.dispatched() == ["other"]
    nodes.admission.at_bound.clear()
    nodes.finish("other")
    await settled()
    assert nodes.dispatched() == ["other", "flood"]


async def test_a_call_of_many_answers_saves_places_up_and_stops_nobody(nodes: Nodes) -> None:
    """Of four places, three come free one by one; it needs three, and others want one each."""
    nodes.admission.has_room = False
    many = [
        GenerationRequest(
            request_id=f"many {i}", prompt=Prompt([1] * 8), sampling=SamplingParams(), slo=BATCH
        )
        for i in range(3)
    ]
    nodes.flow.start_siblings(many)
    for number in range(6):
        nodes.start(f"one {number}", Slo(name="standard"))
    nodes.admission.has_room = True
    for num_free in (1, 1, 2, 2, 3):
        nodes.admission.num_free = num_free
        report(nodes.registry, nodes.decode, NodeRole.DECODE)
        await settled()
    assert nodes.dispatched() == ["one 0", "one 1", "many 0"]


async def test_who_waits_is_hashed_once_however_often_it_is_placed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[object] = []
    place = nodes.router.place_hashed

    def spy(request: GenerationRequest, prompt: PromptHashes) -> Placement:
        placed.append(prompt)
        return place(request, prompt)

    monkeypatch.setattr(nodes.router, "place_hashed", spy)
    nodes.admission.has_room = False
    nodes.start()
    for _ in range(2):
        report(nodes.registry, nodes.prefill, NodeRole.PREFILL)
        await settled()
    assert len(placed) == 3
    assert len(set(map(id, placed))) == 1


async def test_cancelling_in_the_line_tells_no_node(nodes: Nodes) -> None:
    nodes.admission.has_room = False
    running, other = nodes.start("r"), nodes.start("other")
    running.cancel("client disconnected")
    with pytest.raises(RequestCancelled, match="disconnected"):
        await output(running)
    assert said_to(nodes.prefill) == said_to(nodes.decode) == []
    nodes.admission.has_room = True
    await settled()
    assert nodes.dispatched() == ["other"]
    other.cancel("done")
    assert nodes.flow.num_inflight == 0
    assert [type(m) for m in said_to(nodes.decode)] == [DecodeLeg, CancelLeg]


async def test_the_deadline_holds_in_the_line(nodes: Nodes) -> None:
    nodes.admission.has_room = False
    running = nodes.start(deadline_s=0.01)
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await output(running)
    assert nodes.flow.num_inflight == nodes.flow.status().waiting == 0


async def test_the_line_waits_for_a_pool_that_has_gone(nodes: Nodes) -> None:
    nodes.admission.has_room = False
    nodes.start(wait_s=5.0)
    nodes.registry.remove(nodes.decode)
    nodes.admission.has_room = True
    report(nodes.registry, nodes.prefill, NodeRole.PREFILL)
    await settled()
    assert nodes.dispatched() == []
    join(nodes.registry, "d2", NodeRole.DECODE)
    await settled()
    assert nodes.dispatched() == ["r"]


async def test_legs_carry_what_is_left(nodes: Nodes) -> None:
    nodes.start(slo=INTERACTIVE, waited_s=0.5, deadline_s=20.0)
    (leg,) = said_to(nodes.prefill)
    assert isinstance(leg, PrefillLeg)
    assert leg.slo == Slo(name="interactive", priority=2, ttft_s=1.5, tpot_s=0.1, deadline_s=20.0)
    assert said_to(nodes.decode)[0].slo == leg.slo  # type: ignore[attr-defined]


async def test_time_in_the_line_is_taken_off(nodes: Nodes) -> None:
    nodes.admission.has_room = False
    nodes.start(slo=INTERACTIVE, waited_s=0.5, deadline_s=20.0)
    nodes.clock.advance(1.0)
    nodes.admission.has_room = True
    report(nodes.registry, nodes.decode, NodeRole.DECODE)
    await settled()
    (leg,) = said_to(nodes.prefill)
    assert isinstance(leg, PrefillLeg)
    assert (leg.slo.ttft_s, leg.slo.deadline_s) == (0.5, 19.0)


async def test_a_promise_that_is_just_over_is_still_one(nodes: Nodes) -> None:
    nodes.start(slo=INTERACTIVE, waited_s=2.0)
    (slo,) = nodes.admission.asked
    assert slo.ttft_s < 0


async def test_the_clusters_deadline_bounds_the_clients(nodes: Nodes) -> None:
    nodes.start(deadline_s=1e6)
    (slo,) = nodes.admission.asked
    assert slo.deadline_s == 60.0


async def test_nodes_are_to_keep_what_admission_says(nodes: Nodes) -> None:
    nodes.admission.kept = BATCH
    nodes.start(slo=INTERACTIVE)
    (leg,) = said_to(nodes.prefill)
    assert isinstance(leg, PrefillLeg)
    assert leg.slo == BATCH


async def test_admission_hears_what_becomes_of_requests(nodes: Nodes) -> None:
    nodes.start("whole")
    cut = nodes.start("cut")
    nodes.clock.advance(1.0)
    nodes.say(nodes.prefill, "whole", 0)
    nodes.say(nodes.prefill, "whole", 0)  # once more
    nodes.clock.advance(1.0)
    nodes.say(nodes.decode, "whole", 1)
    cut.cancel("client disconnected")
    assert nodes.admission.told == [
        ("dispatched", "whole", 1000.0),
        ("dispatched", "cut", 1000.0),
        ("first token", "whole", 1001.0),
        ("ended", "whole", 1002.0, 2),
        ("ended", "cut", 1002.0, 0),
    ]


async def test_the_status_tells_of_prefixes_and_refusals(nodes: Nodes) -> None:
    nodes.start("r")
    nodes.finish("r")
    status = nodes.flow.status()
    assert status.prefixes == PrefixStatus()
    assert status.refused == {"ttft": 0, "tpot": 0, "inflight": 0, "waiting": 0}
    assert nodes.value("pdserve_prefix_break_tokens_count") == 1


@pytest.mark.parametrize("comes_back", [True, False])
async def test_who_is_in_line_when_a_pool_becomes_empty_waits_as_long_as_its_class_says(
    *, comes_back: bool
) -> None:
    """From then on; a new call waits from its start, and one that is not to wait ends at once."""
    nodes = Nodes()
    nodes.admission.has_room = False
    waiting = nodes.start("waiting", wait_s=5.0)
    hasty = nodes.start("hasty", wait_s=0.0)
    nodes.clock.advance(20.0)
    nodes.registry.remove(nodes.decode)
    with pytest.raises(NoNodeAvailable, match="decode node"):
        await output(hasty)
    nodes.clock.advance(4.0)
    new = nodes.start("new", wait_s=5.0)
    report(nodes.registry, nodes.prefill, NodeRole.PREFILL)
    await settled()
    assert not waiting.has_ended
    if comes_back:
        nodes.admission.has_room = True
        nodes.decode = join(nodes.registry, "d", NodeRole.DECODE)
        await settled()
        assert waiting.dispatch is not None
        assert new.dispatch is not None
        return
    nodes.clock.advance(1.0)
    report(nodes.registry, nodes.prefill, NodeRole.PREFILL)
    await settled()
    with pytest.raises(NoNodeAvailable, match="decode node"):
        await output(waiting)
    assert not new.has_ended
    nodes.clock.advance(4.0)
    report(nodes.registry, nodes.prefill, NodeRole.PREFILL)
    await settled()
    with pytest.raises(NoNodeAvailable, match="decode node"):
        await output(new)
    assert nodes.flow.num_inflight == 0


async def test_who_was_promised_something_during_a_wake_gets_it_from_nodes_that_are_there() -> None:
    nodes = Nodes(Awaited(wake_s=1.0, is_ordered=True, queue_s=0.0, prompt_s=0.5))
    nodes.registry.remove(nodes.decode)
    nodes.admission.has_room = False  # which is for those without a promise
    running, other = nodes.start("promised", INTERACTIVE), nodes.start("other", BATCH)
    with pytest.raises(SloUnreachable) as refusal:
        nodes.start("hasty", INTERACTIVE, waited_s=0.75)
    assert refusal.value.retry_after_s == 1.0
    nodes.clock.advance(0.75)
    nodes.decode = join(nodes.registry, "d", NodeRole.DECODE)
    await settled()
    (leg,) = said_to(nodes.prefill)
    assert isinstance(leg, PrefillLeg)
    assert (leg.request_id, leg.slo.priority, leg.slo.ttft_s) == ("promised", 2, 1.25)
    for one in (running, other):
        one.cancel("done")
    assert nodes.flow.num_inflight == 0
