"""The path of a call through a cluster of simulated nodes.

    arrive ──► front: place, admit ──► prefill ──► token 1 ──► handoff ──► decode ──► ended
                 └──► refused            └──── on the decode node itself: no handoff ───┘

A front is a coordinator, or a stand-in for one. Messages take no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pdserve.engine.request import Request, SampledToken
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.protocol import SamplingParams, Slo
from tests.simulation.events import Events
from tests.simulation.handoff import Handoff, RoomLine
from tests.simulation.node import Node
from tests.simulation.prefix_pull import pull_prefix
from tests.simulation.score import Outcome, Score
from tests.simulation.workload import Call

STOP_TOKEN = 0


class Front(Protocol):
    """Decides where calls go, and when, by `Cluster.dispatch` or `Cluster.refuse`."""

    def arrive(self, call: Call) -> None:
        """Handle the arrival of a call."""
        ...

    def progressed(self, call: Call, num_tokens: int) -> None:
        """Note that the call has `num_tokens` tokens so far; the first one ends its prefill."""
        ...

    def ended(self, call: Call) -> None:
        """Note that the call has all its tokens."""
        ...


@dataclass(slots=True, eq=False)
class _Journey:
    """A dispatched call."""

    outcome: Outcome
    decode: Node | None  # None: the call ends with token 1
    handoff: Handoff | None = None


class Cluster:
    """The nodes, and the calls in progress on them."""

    def __init__(self, events: Events, nodes: Sequence[Node]) -> None:
        self.events = events
        self.nodes = nodes
        self._rooms = {node: RoomLine(node, events) for node in nodes}
        self._journeys: dict[str, _Journey] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._front: Front | None = None
        for node in nodes:
            node.world = self

    def run(self, front: Front, calls: Iterable[Call]) -> Score:
        """Simulate these calls until all have ended; afterwards every node must be empty."""
        self._front = front
        for call in calls:
            self._outcomes[call.call_id] = Outcome(call)
            self.events.at(call.at_s, partial(front.arrive, call))
        self.events.run()
        stuck = [o.call.call_id for o in self._outcomes.values() if not o.has_ended]
        stuck = [call_id for call_id in stuck if not self._outcomes[call_id].was_refused]
        assert not stuck, f"{len(stuck)} calls never ended, among them {stuck[:3]}"
        for node in self.nodes:
            node.check_idle()
        return Score(list(self._outcomes.values()))

    # ---- verbs of the front --------------------------------------------------------------------

    def refuse(self, call: Call) -> None:
        """Refuse the call."""
        self._outcomes[call.call_id].was_refused = True

    def show(self, call: Call, at_s: float) -> None:
        """Record that token 1 was held back until `at_s`."""
        self._outcomes[call.call_id].token_times_s[0] = at_s

    def dispatch(
        self,
        call: Call,
        prefill: Node | None,
        decode: Node | None,
        slo: Slo | None = None,
        prefix_source: Node | None = None,
    ) -> None:
        """Dispatch a call to its nodes.

        Without `prefill` the decode node prefills; `slo` gives the targets counted from now.
        """
        journey = _Journey(self._outcomes[call.call_id], decode)
        self._journeys[call.call_id] = journey
        now_s = self.events.now_s
        request = Request(
            request_id=call.call_id,
            prompt_token_ids=call.token_ids,
            sampling=SamplingParams(max_tokens=call.max_tokens, stop_token_ids=[STOP_TOKEN]),
            cache_salt=call.cache_salt,
            lifecycle=Lifecycle(received_s=now_s),
            leg_token_limit=None if prefill is None else 1,
            targets=Targets.of(slo or left_of(call, now_s), now_s),
        )
        first = prefill or decode
        assert first is not None, "a call needs a node"
        if prefill is not None and decode is not None and call.num_output > 1:
            journey.handoff = Handoff(request, prefill, decode, self._rooms[decode], self.events)
        if prefix_source is None:
            first.submit(request)
        else:
            submit = partial(first.submit, request)
            pull_prefix(request, prefix_source, first, self.events, submit)

    @property
    def is_busy(self) -> bool:
        """Whether any call is in progress or still to arrive."""
        return any(not (o.has_ended or o.was_refused) for o in self._outcomes.values())

    def num_waiting_for_room(self, node: Node) -> int:
        """Number of handoffs that wait for blocks on this node."""
        return len(self._rooms[node])

    # ---- what nodes say ------------------------------------------------------------------------

    def next_token(self, request: Request) -> SampledToken:
        """As World. Different prompts end in different tokens, so answers differ too."""
        outcome = self._journeys[request.request_id].outcome
        is_last = len(outcome.token_times_s) + 1 == outcome.call.num_output
        return SampledToken(STOP_TOKEN if is_last else request.prompt_token_ids[-1])

    def step_done(self, node: Node, sampled: Sequence[tuple[Request, SampledToken | None]]) -> None:
        """As World."""
        for request, token in sampled:
            journey = self._journeys[request.request_id]
            handoff = journey.handoff
            if handoff is not None and request is not handoff.request:
                handoff.announce() if token is None else handoff.publish()
            if token is not None:
                if not journey.outcome.token_times_s:
                    journey.outcome.num_cached_tokens = request.num_cached_tokens
                self._deliver(journey)
        self._rooms[node].offer()

    def _deliver(self, journey: _Journey) -> None:
        outcome = journey.outcome
        outcome.token_times_s.append(self.events.now_s)
        assert self._front is not None
        self._front.progressed(outcome.call, len(outcome.token_times_s))
        if outcome.has_ended:
            del self._journeys[outcome.call.call_id]
            self._front.ended(outcome.call)


def left_of(call: Call, now_s: float) -> Slo:
    """Return the call's targets, less the time that it has waited before dispatch."""
    slo, waited_s = call.slo, now_s - call.at_s
    if not waited_s or not slo.ttft_s:
        return slo
    return Slo(
        name=slo.name,
        priority=slo.priority,
        weight=slo.weight,
        ttft_s=slo.ttft_s - waited_s,
        hold_s=slo.hold_s - waited_s,
        tpot_s=slo.tpot_s,
    )
