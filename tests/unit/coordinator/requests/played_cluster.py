"""A flow over nodes that do what they are told, fail, vanish and come back, all at random."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
from msgspec.structs import replace

from coordinator.admission import Admission, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Registry
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowTimes
from coordinator.routing import Router
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
)
from pdserve.settings.config import Mode
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import NoNodeAvailable, Overloaded, RequestQuarantined
from tests.fakes.hellos import node_hello
from tests.fakes.members import listen, made_flow
from tests.unit.coordinator.routing.nodes import PERF

NUM_BLOCKS = 200
CLASSES = [
    Slo(),
    Slo(name="batch", tenant="a"),
    Slo(name="batch", tenant="b", weight=2.0),
    Slo(name="interactive", priority=2, ttft_s=0.5, tpot_s=0.02, hold_s=0.45),
    Slo(name="standard", priority=1, ttft_s=2.0, tpot_s=0.05, hold_s=1.8, tenant="a"),
    Slo(name="first", priority=1, ttft_s=1.0),
    Slo(name="further", priority=1, tpot_s=0.02),
]


class PlayedNode:
    """A node that works on its legs a bit at a time; it is its own outbox."""

    def __init__(self, cluster: PlayedCluster, name: str, role: NodeRole) -> None:
        self._cluster = cluster
        self._random = cluster.random
        self.name = name
        self.state, self.role = NodeState.READY, role
        self._legs: dict[str, tuple[int, int, bool]] = {}  # id |-> (next index, most, hands off)
        self._taking: dict[str, DecodeLeg] = {}  # those whose streams run elsewhere
        hello = node_hello(
            name, role, incarnation=str(self._random.random()), num_blocks=NUM_BLOCKS
        )
        hello = replace(hello, max_model_len=4096, session_address=f"host-{name[-1]}:1")
        self.member = cluster.registry.add(hello, self)  # type: ignore[arg-type]

    def send(self, message: msgspec.Struct) -> None:
        """Take a leg on, or drop it."""
        match message:
            case PrefillLeg(sampling=sampling, handoff=handoff):
                self._legs |= dict.fromkeys(message.request_ids, (0, sampling.max_tokens, handoff))
            case DecodeLeg(takes_over=taken) if taken:
                self._taking[message.request_id] = message
            case DecodeLeg(request_id=request_id, sampling=sampling, source=source):
                index = len(message.output_token_ids) if source is None else 1
                assert message.output_token_ids == [*range(index)] or source is not None
                self._legs[request_id] = (index, sampling.max_tokens, False)
            case CancelLeg(request_id=request_id):
                self._legs.pop(request_id, None)
                self._taking.pop(request_id, None)

    def work(self) -> None:
        """Take streams over, and tell of some tokens of some legs; a few legs end or fail."""
        for leg in list(self._taking.values()):
            if self._random.random() < 0.5:
                self._take_over(leg)
        batch = TokenBatch(events=[], request_ids=[], indices=[], token_ids=[])
        for request_id, (index, most, hands_off) in list(self._legs.items()):
            luck = self._random.random()
            if luck < 0.5 or request_id not in self._legs:
                continue
            if luck < 0.51:
                del self._legs[request_id]
                failure = LegFailed(request_id=request_id, code="peer_lost", message="at random")
                self._cluster.flow.leg_failed(failure, self.member)
                continue
            num_tokens = min(most - index, 1 if index == 0 else self._random.choice([1, 1, 3]))
            is_last = index + num_tokens >= most or luck > 0.97
            self._legs[request_id] = (index + num_tokens, most, hands_off)
            if is_last or hands_off:
                del self._legs[request_id]
            event = TokenEvent(
                request_id=request_id, index=index, token_ids=[*range(index, index + num_tokens)]
            )
            if is_last:
                event = replace(event, finish_reason=FinishReason.LENGTH)
            batch.events.append(event)
        self._cluster.flow.tokens(batch, self.member)

    def _take_over(self, leg: DecodeLeg) -> None:
        """Have a stream end with its next token where it is, and go on here; or fail."""
        del self._taking[leg.request_id]
        assert leg.source is not None
        sources = [n for n in self._cluster.nodes if n.member.hello.node_id == leg.source.node_id]
        stream = sources[0]._legs.pop(leg.takes_over, None) if sources else None
        if stream is None or self._random.random() < 0.1:
            failure = LegFailed(request_id=leg.request_id, code="peer_lost", message="not there")
            self._cluster.flow.leg_failed(failure, self.member)
        if stream is None:
            return
        index, most, _ = stream
        is_last = index + 1 >= most
        event = TokenEvent(request_id=leg.takes_over, index=index, token_ids=[index])
        if is_last:
            event = replace(event, finish_reason=FinishReason.LENGTH)
        else:
            self._legs[leg.request_id] = (index + 1, most, False)
            event = replace(event, is_taken_over=True)
        self._cluster.flow.tokens(TokenBatch(events=[event]), sources[0].member)

    def report(self) -> None:
        """Report some load or other."""
        load = LoadReport(
            state=self.state,
            role=self.role,
            queued_tokens=self._random.randrange(2000),
            running_requests=len(self._legs),
            waiting_requests=self._random.randrange(3),
            free_blocks=self._random.randrange(NUM_BLOCKS),
            decode_ratio=self._random.choice([0.0, 1.0, 1.5]),
        )
        self._cluster.registry.report(self.member, load)


class PlayedCluster:
    """The flow, its nodes, and every request that was not refused, with what it was told."""

    def __init__(self, mode: Mode, seed: int) -> None:
        self.random = Random(seed)
        self.clock = ManualClock(100.0)
        self.registry = Registry()
        self.router = Router(self.registry, mode, "predicted", self.clock)
        line = WaitingLine[RunningRequest](6)
        self.admission = Admission(line, max_inflight=self.random.choice([6, 20, 100]))
        self.flow = made_flow(
            self.registry,
            self.router,
            self.admission,
            clock=self.clock,
            times=FlowTimes(request_s=1e5, resume_s=30.0, line_gap_s=0.0),
        )
        self.nodes: list[PlayedNode] = []
        self.told: list[tuple[RunningRequest, list[TokenEvent | Exception]]] = []
        self.num_refused = 0
        self._num_started = 0

    async def live(self, num_steps: int) -> None:
        """Let anything happen, many times."""
        happenings = {
            self.join: 2,
            self.start: 35,
            self.work: 45,
            self.report: 4,
            self.change: 2,
            self.lose: 1,
            self.cancel: 3,
            self.pass_time: 4,
        }
        for happening in self.random.choices(*zip(*happenings.items(), strict=True), k=num_steps):
            happening()
            if self.random.random() < 0.05:
                await self.settle()

    async def finish(self) -> None:
        """Both pools have a node, and all nodes work until nothing is left, or nothing moves."""
        self.nodes += [PlayedNode(self, f"last-{role.value}", role) for role in NodeRole]
        for _ in range(2000):
            if not self.flow.num_inflight:
                return
            for node in self.nodes:
                node.work()
                node.report()
            self.clock.advance(0.05)
            await self.settle()

    async def settle(self) -> None:
        """Let the line be served."""
        for _ in range(3):
            await asyncio.sleep(0)

    # ---- what can happen -----------------------------------------------------------------------

    def join(self) -> None:
        """A node joins, perhaps in another life of one that is there."""
        name = f"n{self.random.randrange(6)}"
        self.nodes = [node for node in self.nodes if node.name != name]
        self.nodes.append(PlayedNode(self, name, self.random.choice(list(NodeRole))))

    def start(self) -> None:
        """A call with one or several answers."""
        self._num_started += 1
        prompt = [self.random.randrange(3)] * self.random.choice([1, 5, 40, 300, 1500])
        sampling = SamplingParams(max_tokens=self.random.choice([0, 1, 2, 8, 30, 200]))
        slo, waited_s = self.random.choice(CLASSES), self.random.choice([0.0, 0.1, 3.0])
        answers = [
            GenerationRequest(
                request_id=f"{self._num_started}-{answer}",
                prompt=Prompt(prompt),
                sampling=sampling,
                slo=slo,
                waited_s=waited_s,
            )
            for answer in range(self.random.choice([1, 1, 1, 2, 3]))
        ]
        try:
            started = self.flow.start_siblings(answers)
        except (NoNodeAvailable, Overloaded, RequestQuarantined):
            self.num_refused += 1
            return
        for running in started:
            told: list[TokenEvent | Exception] = []
            listen(running, told.append)
            self.told.append((running, told))

    def work(self) -> None:
        """A node takes a step."""
        if self.nodes:
            self.random.choice(self.nodes).work()

    def report(self) -> None:
        """A node reports its load."""
        if self.nodes:
            self.random.choice(self.nodes).report()

    def change(self) -> None:
        """A node changes its pool, begins to drain, or reports what its steps cost."""
        if self.nodes:
            node = self.random.choice(self.nodes)
            node.role = self.random.choice(list(NodeRole))
            node.state = self.random.choice([NodeState.READY] * 4 + [NodeState.DRAINING])
            node.report()
            self.registry.profiled(node.member, PERF)

    def lose(self) -> None:
        """A node is gone."""
        if self.nodes:
            node = self.nodes.pop(self.random.randrange(len(self.nodes)))
            self.registry.remove(node.member)

    def cancel(self) -> None:
        """A client has gone away; its request may have ended long ago."""
        if self.told:
            self.random.choice(self.told)[0].cancel("at random")

    def pass_time(self) -> None:
        """From a millisecond to beyond the calendar's horizon."""
        self.clock.advance(self.random.choice([0.001, 0.05, 0.5, 5.0, 40.0]))
