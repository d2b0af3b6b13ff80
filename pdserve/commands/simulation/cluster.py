"""The path of a call through a cluster of simulated nodes.

    arrive ──► front: place, admit ──► prefill ──► token 1 ──► handoff ──► decode ──► ended
                 └──► refused            └──── on the decode node itself: no handoff ───┘

A front is a coordinator, or a stand-in for one. Messages take what the calibration says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Protocol

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.handoff import Handoff, RoomLine
from pdserve.commands.simulation.messages import Messages
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.outcome import Outcome
from pdserve.commands.simulation.prefix_pull import pull_prefix
from pdserve.commands.simulation.prompts import STOP_TOKEN, request_of
from pdserve.engine.request import Request, SampledToken
from pdserve.lifecycle import Targets
from pdserve.protocol import Slo

_STOP = SampledToken(STOP_TOKEN)

Seen = Callable[[Outcome], None]
"""Is told the outcome of each call, when it has ended or was refused."""


class Front(Protocol):
    """Decides where calls go, and when, by `Cluster.dispatch` or `Cluster.refuse`."""

    def arrive(self, call: Call) -> None:
        """Handle the arrival of a call."""
        ...

    def progressed(self, call: Call, num_tokens: int) -> None:
        """Note that the call has `num_tokens` tokens so far; the first one ends its prefill."""
        ...

    def silent_until_s(self, call: Call, num_tokens: int) -> float:
        """Return until when further tokens, but the last, need not be reported by `progressed`.

        -inf: each must be reported before the next step begins, since it may change that step.
        """
        ...

    def ended(self, call: Call) -> None:
        """Note that the call has all its tokens."""
        ...


@dataclass(slots=True, eq=False)
class _Journey:
    """A dispatched call."""

    outcome: Outcome
    decode: Node | None  # None: the call ends with token 1
    token: SampledToken  # all its tokens but the last
    expected_output: int  # as `DecodeLeg.expected_output`
    handoff: Handoff | None = None
    silent_until_s: float = -inf
    moves_on: Callable[[], None] | None = None  # called once, right after its next token


class Cluster:
    """The nodes, and the calls in progress on them."""

    def __init__(
        self, events: Events, nodes: Sequence[Node], messages: Messages | None = None
    ) -> None:
        self.events = events
        self.nodes = nodes
        self.messages = messages or Messages()
        self._rooms = {node: RoomLine(node, events) for node in nodes}
        self._journeys: dict[str, _Journey] = {}
        self._outcomes: dict[str, Outcome] = {}  # of calls in progress
        self._arriving: Iterator[Call] = iter(())
        self._next: Call | None = None
        self._awaiting: dict[str, list[Call]] = {}  # the end of a call |-> those that follow
        # Calls that wait for the end of another one, or whose user thinks.
        self._to_follow: dict[str, Call] = {}
        self._stop_s = inf
        self._front: Front | None = None
        self._seen: Seen = _nobody_looks
        self.call_seconds = 0.0  # that calls have spent here until their ends
        self.num_arrived = 0
        self.num_met = 0  # calls in flight that arriving ones have found here, all together
        for node in nodes:
            node.world = self

    def run(
        self,
        front: Front,
        calls: Iterable[Call],
        seen: Seen,
        until_s: float = inf,
        stop_s: float = inf,
    ) -> None:
        """Simulate these calls, in order of time, until all have ended, `until_s` or `Events.stop`.

        They are read as they arrive, so that neither they nor their outcomes need memory for long.
        When all have ended, every node must be empty. Calls that would follow another one later
        than `stop_s` do not, and are left out.
        """
        self._stop_s = stop_s
        self._front, self._seen = front, seen
        self._arriving = iter(calls)
        self._await_next()
        if not self.events.run(until_s):
            return
        stuck = [*self._outcomes, *self._to_follow]
        assert not stuck, f"{len(stuck)} calls never ended, among them {stuck[:3]}"
        for node in self.nodes:
            node.check_idle()

    def unfinished(self) -> list[Outcome]:
        """Return what is known of the calls in progress, after a run that did not reach its end.

        Those that would have followed are among them, as users wanted them, too; but not if there
        is a time from which none do.
        """
        for node in self.nodes:
            node.sync()
        wanted = self._to_follow.values() if self._stop_s == inf else ()
        return [*self._outcomes.values(), *map(Outcome, wanted)]

    def _await_next(self) -> None:
        self._next = next(self._arriving, None)
        if self._next is not None:
            self.events.at(self._next.at_s, self._arrive)

    def _arrive(self) -> None:
        while (call := self._next) is not None and call.at_s <= self.events.now_s:
            self._next = next(self._arriving, None)
            if call.after in self._outcomes or call.after in self._to_follow:
                self._awaiting.setdefault(call.after, []).append(call)
                self._to_follow[call.call_id] = call
            elif call.after:  # that one was refused
                self._follow(call)
            else:
                self._arrived(call)
        if self._next is not None:
            self.events.at(self._next.at_s, self._arrive)

    def _arrived(self, call: Call) -> None:
        self._to_follow.pop(call.call_id, None)
        self.num_arrived += 1
        self.num_met += len(self._outcomes)
        self._outcomes[call.call_id] = outcome = Outcome(call, call.at_s)
        self.messages.send(call.prompt.num_tokens, partial(self._sent, outcome))

    def _sent(self, outcome: Outcome) -> None:
        assert self._front is not None
        call, outcome.sent_s = outcome.call, self.events.now_s
        self.messages.accept(call.prompt.num_tokens, partial(self._front.arrive, call))

    def _follow(self, call: Call) -> None:
        """Have the call arrive once its user has thought, if that is not too late."""
        due = replace(call, at_s=self.events.now_s + call.think_s)
        if due.at_s > self._stop_s:
            self._leave_out(call)
            return
        self._to_follow[call.call_id] = call
        self.events.at(due.at_s, partial(self._arrived, due))

    def _leave_out(self, call: Call) -> None:
        left = [call]
        while left:
            out = left.pop()
            self._to_follow.pop(out.call_id, None)
            left += self._awaiting.pop(out.call_id, ())

    def _is_over(self, call: Call) -> None:
        for follower in self._awaiting.pop(call.call_id, ()):
            self._follow(follower)

    # ---- verbs of the front --------------------------------------------------------------------

    def refuse(self, call: Call) -> None:
        """Refuse the call."""
        outcome = self._outcomes.pop(call.call_id)
        outcome.was_refused = True
        self._seen(outcome)
        self._is_over(call)

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
        *,
        flows: bool = False,
        expected_output: int = 0,
    ) -> None:
        """Dispatch a call to its nodes.

        Without `prefill` the decode node prefills; `slo` gives the targets counted from now, and
        `flows` and `expected_output` are those of DecodeLeg.
        """
        token = SampledToken(call.prompt.token_ids[-1])
        journey = _Journey(self._outcomes[call.call_id], decode, token, expected_output)
        self._journeys[call.call_id] = journey
        now_s = self.events.now_s
        targets = Targets.of(slo or left_of(call, now_s), now_s)
        limit = None if prefill is None else 1
        request = request_of(call, targets, now_s, limit)
        request.flows, request.expected_output = flows, expected_output
        first = prefill or decode
        assert first is not None, "a call needs a node"
        if prefill is not None and decode is not None and call.num_output > 1:
            adopted = request_of(call, targets, now_s, None)
            adopted.expected_output = expected_output
            journey.handoff = Handoff(
                request, adopted, prefill, decode, self._rooms[decode], self.events
            )
        submit = partial(first.submit, request)
        if prefix_source is not None:
            submit = partial(pull_prefix, request, prefix_source, first, self.events, submit)
        if prefill is not None:  # else it is in the times of its mixed steps
            submit = partial(first.take_in, call.prompt.num_tokens, submit)
        if first.machine.overheads.first_token_s:
            self.events.after(first.machine.overheads.first_token_s, submit)
        else:
            submit()

    def call(self, call_id: str) -> Call:
        """Return a dispatched call."""
        return self._journeys[call_id].outcome.call

    def prefetch(self, call: Call, target: Node, then: Callable[[], None]) -> None:
        """Fetch a stream's KV to `target`; `then` is called after its next token, if there is one.

        Meanwhile it goes on where it is.
        """
        journey = self._journeys[call.call_id]
        assert journey.decode is not None
        going_on = self._goes_on(journey, Slo())

        def fetched() -> None:
            journey.moves_on = then

        pull_prefix(going_on, journey.decode, target, self.events, fetched)

    def go_on(self, call: Call, target: Node, slo: Slo) -> None:
        """Take a stream from its node, which is between two steps, and have `target` go on."""
        journey = self._journeys[call.call_id]
        source, request = journey.decode, self._goes_on(journey, slo)
        assert source is not None
        source.core.cancel(call.call_id)
        journey.decode, journey.silent_until_s = target, -inf
        self.events.after(target.machine.overheads.first_token_s, partial(target.submit, request))

    def _goes_on(self, journey: _Journey, slo: Slo) -> Request:
        """Return the request that goes on after the tokens that the call has so far."""
        call, now_s = journey.outcome.call, self.events.now_s
        request = request_of(call, Targets.of(slo, now_s), now_s, None)
        request.num_emitted_before = len(journey.outcome.token_times_s)
        request.expected_output = journey.expected_output
        request.output_token_ids = [journey.token.token_id] * request.num_emitted_before
        return request

    @property
    def is_busy(self) -> bool:
        """Whether any call is in progress or still to arrive."""
        return self._next is not None or bool(self._outcomes) or bool(self._to_follow)

    def num_waiting_for_room(self, node: Node) -> int:
        """Number of handoffs that wait for blocks on this node."""
        return len(self._rooms[node])

    # ---- what nodes say ------------------------------------------------------------------------

    def next_token(self, request: Request, num_later: int = 0) -> SampledToken:
        """As World. Different prompts end in different tokens, so answers differ too."""
        journey = self._journeys[request.request_id]
        outcome = journey.outcome
        is_last = len(outcome.token_times_s) + 1 + num_later == outcome.call.num_output
        return _STOP if is_last else journey.token

    def step_done(self, node: Node, sampled: Sequence[tuple[Request, SampledToken | None]]) -> None:
        """As World."""
        journeys = self._journeys
        told: list[tuple[Outcome, int]] = []  # answers, and which of their tokens
        for request, token in sampled:
            journey = journeys[request.request_id]
            handoff = journey.handoff
            if handoff is not None and request is not handoff.request:
                handoff.announce() if token is None else handoff.publish()
            if token is not None:
                for _ in range(1 + len(token.after)):
                    number = len(journey.outcome.token_times_s)
                    self._deliver(journey, request, len(sampled))
                    if self.messages.client is None:
                        self._received([(journey.outcome, number)])
                    else:
                        told.append((journey.outcome, number))
        if told:
            self.messages.tell(len(told), partial(self._received, told))
        self._rooms[node].offer()

    def num_left(self, request: Request) -> int:
        """As World."""
        outcome = self._journeys[request.request_id].outcome
        return outcome.call.num_output - len(outcome.token_times_s)

    def silent_until_s(self, requests: Iterable[Request]) -> float:
        """As World."""
        journeys = self._journeys
        return min(journeys[request.request_id].silent_until_s for request in requests)

    def tell_due(self, requests: Iterable[Request], num_skipped: int) -> None:
        """As World."""
        assert self._front is not None
        journeys, now_s = self._journeys, self.events.now_s
        for request in requests:
            journey = journeys[request.request_id]
            if now_s >= journey.silent_until_s:
                outcome = journey.outcome
                num_tokens = len(outcome.token_times_s) + num_skipped
                self._front.progressed(outcome.call, num_tokens)
                journey.silent_until_s = self._front.silent_until_s(outcome.call, num_tokens)

    def steps_skipped(self, requests: Iterable[Request], ends_s: Sequence[float]) -> None:
        """As World."""
        for request in requests:
            self._journeys[request.request_id].outcome.token_times_s.extend(ends_s)

    def _deliver(self, journey: _Journey, request: Request, batch: int) -> None:
        outcome, now_s = journey.outcome, self.events.now_s
        times_s, call = outcome.token_times_s, outcome.call
        times_s.append(now_s)  # until the client has it
        has_ended = len(times_s) == call.num_output
        if journey.moves_on is not None and not has_ended:
            moves_on, journey.moves_on = journey.moves_on, None
            self.events.soon(moves_on)
        if now_s < journey.silent_until_s and not has_ended:
            return
        if len(times_s) == 1:
            outcome.num_cached_tokens = request.num_cached_tokens
            outcome.at_prefill = request.lifecycle
        assert self._front is not None
        self._front.progressed(call, len(times_s))
        if has_ended:
            outcome.at_decode = request.lifecycle
            del self._journeys[call.call_id]
            self._front.ended(call)
            self.messages.told(call.num_output, batch)
        else:
            journey.silent_until_s = self._front.silent_until_s(call, len(times_s))

    def _received(self, told: Iterable[tuple[Outcome, int]]) -> None:
        """Note that the client has these tokens of these answers."""
        now_s = self.events.now_s
        for outcome, number in told:
            call, times_s = outcome.call, outcome.token_times_s
            times_s[number] = max(times_s[number], now_s)  # it may have been held back until then
            if number + 1 == call.num_output:
                self.call_seconds += now_s - call.at_s
                self._seen(self._outcomes.pop(call.call_id))
                self._is_over(call)


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


def _nobody_looks(_: Outcome) -> None:
    """The default `Seen`, before a run."""
