"""The admission policy: dispatches, queues or refuses each request when it arrives.

A request that would miss its class's TTFT or TPOT is refused before any work is done for it:
refusing it after the prefill would waste the prefill, and its work would make other requests late.
The decision is based on the load predicted for the time when the request reaches each pool, not on
the current load, which lags by one prefill and makes the two pools oscillate against each other
(Mooncake, FAST'25, section 6). The predictions come from the router (`PredictedTimes`).

After a refusal, a class is admitted again only when a tenth of its slack (`slack.py`) is free, so
that admission does not flap. Retry-After is the predicted time until then: until the queue is short
enough, or enough decodes have ended.

Requests without a promise wait in the coordinator's line, which is shared between their payers,
while they would use more than a share of the slack of classes with promises that are present
(`in_flight.py`). If no such class is present, they are held back only beyond the backlog that
keeps the pools busy. Requests whose promise even idle nodes could not keep are treated the same
way: waiting would not make it possible, so a refusal would help nobody.

While a model has no nodes, the time until one has woken is part of the prediction. Whose promise
leaves that time waits with it; it was admitted, and is sent as soon as there are nodes. Others wait
without theirs, until the wake is ordered, since it is ordered because they wait. After that they
are refused, if nodes that are awake could keep it: Retry-After is the wake and the queue.

There is no clock and no event loop here: times are arguments.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.admission.arrivals import Arrivals
from coordinator.admission.decisions import (
    REASONS,
    Admit,
    Awaited,
    Decision,
    PredictedTimes,
    Reason,
    Refuse,
    Wait,
)
from coordinator.admission.in_flight import InFlight, Presence
from coordinator.admission.slack import ClassSlack, Slack, has_promise, is_possible, without_promise
from coordinator.admission.waiting_line import WaitingLine
from pdserve.protocol import Slo
from pdserve.shared.errors import Overloaded, SloUnreachable

T = TypeVar("T")  # the waiter

HYSTERESIS = 0.1  # share of the slack that must be free before a refused class is admitted again
SPARE_SHARE = 0.5  # share of promises' slack that requests without a promise may use
BACKLOG_S = 2.0  # of queued prefill for requests without a promise when they are alone
OUTPUT_COST = 4  # prompt tokens that one output token counts as, as in most price lists
UNFORESEEN_S = 30.0  # Retry-After if the request does not fit within the forecast's horizon

_WHAT: dict[Reason, str] = {"ttft": "token 1", "tpot": "each further token"}


@dataclass(slots=True)
class _Running:
    """A request that has been dispatched."""

    slo: Slo
    predicted: PredictedTimes
    at_s: float
    is_present: bool  # its class is: others leave it its slack, and nodes are there for it
    first_token_s: float | None = None
    was_interrupted: bool = False  # its times say nothing of what was predicted


class Admission(Generic[T]):
    """The policy of one coordinator; must be told about the progress of admitted requests."""

    def __init__(
        self,
        line: WaitingLine[T],
        *,
        max_inflight: int = sys.maxsize,
        in_flight: InFlight | None = None,
        refuses: bool = True,
        lowest_priority: int = 0,
    ) -> None:
        """Make a policy.

        Args:
            line: where requests wait.
            max_inflight: limit on requests in flight, independent of predictions.
            in_flight: those of others, too, with the limit on all; None: there are no others.
            refuses: if False, only that limit applies, and no request waits.
            lowest_priority: the highest priority of requests whose promise is impossible.
        """
        self.line = line
        self._refuses = refuses
        self._lowest_priority = lowest_priority
        self._slacks: dict[str, ClassSlack] = {}  # by class: higher classes delay lower ones
        self._presence = Presence()
        self.arrivals = Arrivals()
        self._refusing: set[tuple[str, str, Reason]] = set()  # by class and tenant
        self.num_refused: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._running: dict[str, _Running] = {}  # by request id
        self.on_nodes: Counter[int] = Counter()  # requests by priority
        self.ended_s: dict[int, float] = {}  # priority |-> when one has last ended
        self._in_flight = (
            InFlight(max_inflight) if in_flight is None else in_flight
        )  # with those admitted, and dispatched later

    def __contains__(self, request_id: str) -> bool:
        """Whether the request was dispatched, and has not ended."""
        return request_id in self._running

    @property
    def max_inflight(self) -> int:
        """The limit on requests in flight."""
        return self._in_flight.most

    def decide(
        self,
        slo: Slo,
        predicted: PredictedTimes,
        now_s: float,
        tpot_within_s: Callable[[float], float | None] = lambda tpot_s: None,
        num_answers: int = 1,
    ) -> Decision:
        """Decide about a request that arrives now, or several answers to one prompt.

        `slo` is what is left of its promise. `tpot_within_s` returns the seconds until a given TPOT
        will be possible, or None if that is beyond the forecast.
        """
        self.arrivals.observe(
            slo.name,
            predicted.idle_ttft_s,
            now_s,
            predicted.prompt_tokens,
            predicted.output_tokens,
        )
        decision = self._decide(slo, predicted, now_s, tpot_within_s, num_answers)
        if isinstance(decision, Refuse):
            self.num_refused[decision.reason] += 1
        return decision

    def decide_without_nodes(
        self, slo: Slo, awaited: Awaited | None, now_s: float, num_answers: int = 1
    ) -> Decision:
        """Decide about a request that arrives while there are no nodes, but will be some.

        `slo` is what is left of its promise. Where nobody knows what is awaited, no promise could
        be kept, so it waits as one without.
        """
        self.arrivals.observe(slo.name, 0.0, now_s)
        decision: Decision = self._full(num_answers)
        if self._in_flight.has_place(num_answers, slo.tenant):
            if awaited is not None and self._refuses and has_promise(slo):
                decision = self._by_wake(slo, awaited, now_s)
            else:
                wake_s = 0.0 if awaited is None else awaited.wake_s
                decision = self._in_line(self._unpromised(slo), now_s, wake_s)
        if isinstance(decision, Refuse):
            self.num_refused[decision.reason] += 1
        return decision

    def wait(self, request_id: str, waiter: T, slo: Slo, now_s: float, decision: Wait) -> Slo:
        """Put a request in line for which there was a Wait; returns what it waits as."""
        waits_as = slo if decision.keeps_promise else self._unpromised(slo)
        self.line.join(request_id, waiter, waits_as, now_s)
        return waits_as

    def reconsider(
        self, slo: Slo, predicted: PredictedTimes, now_s: float, num_answers: int = 1
    ) -> Admit | Wait:
        """Decide again about the head of the line."""
        if self._has_spare(slo, predicted, now_s, num_answers):
            return Admit(self._unpromised(slo))
        return Wait()

    def is_at_bound(self, slo: Slo, num_answers: int) -> bool:
        """Return whether the tenant has too many requests in flight for so many more answers."""
        return self._in_flight.is_at_bound(num_answers, slo.tenant)

    def fits(self, num_answers: int) -> bool:
        """Return whether there are places for so many more answers, of whichever tenant."""
        return len(self._in_flight) + num_answers <= self.max_inflight

    def tightest(self, now_s: float) -> tuple[float, float] | None:
        """Return the shortest promised TTFT and TPOT of classes that are present; None if none."""
        return self._presence.tightest(now_s)

    def longest_wait_s(self, now_s: float) -> float:
        """Return for how long the oldest request in line has waited; 0 for none."""
        return self.line.longest_wait_s(now_s)

    # ---- progress of requests ------------------------------------------------------------------

    def dispatched(
        self, request_id: str, slo: Slo, predicted: PredictedTimes, now_s: float
    ) -> None:
        """Record that a request, admitted with this `slo`, is being sent to its nodes."""
        self._in_flight.add([request_id], slo.tenant)
        if (former := self._running.get(request_id)) is not None:
            self.on_nodes[former.slo.priority] -= 1
        # Where nobody is refused, no number of nodes may be enough for a promise.
        is_present = has_promise(slo) if self._refuses else is_possible(slo, predicted)
        self._running[request_id] = _Running(slo, predicted, now_s, is_present)
        self.on_nodes[slo.priority] += 1
        if is_present:
            self._presence.dispatched(slo, now_s)
        elif not has_promise(slo):
            num_tokens = predicted.uncached_tokens + OUTPUT_COST * predicted.output_tokens
            self.line.charge(slo, num_tokens)

    def will_follow(self, request_ids: Iterable[str], slo: Slo) -> None:
        """Reserve places for requests that are dispatched without a further decision."""
        self._in_flight.add(request_ids, slo.tenant)

    def first_token(self, request_id: str, now_s: float) -> None:
        """Learn from the TTFT of a request whose token 1 has arrived."""
        request = self._running.get(request_id)
        if request is not None and request.first_token_s is None and not request.was_interrupted:
            request.first_token_s = now_s
            real_s = now_s - request.at_s
            self._slack_of(request.slo).learn_ttft(request.slo.ttft_s, request.predicted, real_s)

    def interrupted(self, request_id: str) -> None:
        """Learn nothing from a request that loses time because a node was lost."""
        request = self._running.get(request_id)
        if request is not None:
            request.first_token_s = None
            request.was_interrupted = True

    def ended(self, request_id: str, now_s: float, num_tokens: int = 0) -> None:
        """Record the end of a request.

        `num_tokens` is its output; 0 if it did not finish normally, so its TPOT is not learned.
        """
        self._in_flight.remove(request_id)
        request = self._running.pop(request_id, None)
        if request is None:
            return
        slo, predicted = request.slo, request.predicted
        self.on_nodes[slo.priority] -= 1
        self.ended_s[slo.priority] = now_s
        if request.is_present:
            self._presence.ended(slo, now_s)
        elif num_tokens and not has_promise(slo):
            self.line.charge(slo, OUTPUT_COST * (num_tokens - predicted.output_tokens))
        if num_tokens > 1 and request.first_token_s is not None:
            real_s = (now_s - request.first_token_s) / (num_tokens - 1)
            self._slack_of(slo).learn_tpot(slo.tpot_s, predicted, real_s)

    # ---- parts ---------------------------------------------------------------------------------

    def _decide(
        self,
        slo: Slo,
        predicted: PredictedTimes,
        now_s: float,
        tpot_within_s: Callable[[float], float | None],
        num_answers: int,
    ) -> Decision:
        has_place = self._in_flight.has_place(num_answers, slo.tenant)
        if self._refuses and num_answers <= self.max_inflight:
            if not is_possible(slo, predicted):
                return self._by_line(slo, predicted, now_s, num_answers)
            self._presence.seen(slo, now_s)
            if has_place:
                return self._by_promise(slo, predicted, now_s, tpot_within_s)
        elif has_place:
            return Admit(slo)
        return self._full(num_answers)

    def _full(self, num_answers: int) -> Refuse:
        error = Overloaded(
            f"{len(self._in_flight)} requests are in flight and this call adds {num_answers}, but "
            f"at most {self.max_inflight} can be, of a tenant nine times as many as are left"
        )
        return Refuse("inflight", error)

    def _by_promise(
        self,
        slo: Slo,
        predicted: PredictedTimes,
        now_s: float,
        tpot_within_s: Callable[[float], float | None],
    ) -> Decision:
        slacks, share = self._slack_of(slo), self._presence.share(slo, now_s)
        of_promises: list[Slack] = []
        if slo.ttft_s:
            of_promises.append(slacks.ttft(slo.ttft_s, predicted))
        if slo.tpot_s:
            idle_s = predicted.idle_tpot_s
            tpot_s = self._presence.tightest_tpot_s(slo, idle_s)
            of_promises.append(slacks.tpot(tpot_s, predicted))
        for slack in of_promises:
            key = (slo.name, slo.tenant, slack.reason)
            if slack.exceeds(share * (1 - HYSTERESIS) if key in self._refusing else share):
                self._refusing.add(key)
                fits_s = slack.slack_s * share * (1 - HYSTERESIS)
                return Refuse(slack.reason, self._unreachable(slo, slack, fits_s, tpot_within_s))
        self._refusing -= {(slo.name, slo.tenant, reason) for reason in REASONS}
        return Admit(slo)

    def _by_line(
        self, slo: Slo, predicted: PredictedTimes, now_s: float, num_answers: int
    ) -> Decision:
        unpromised = self._unpromised(slo)
        if len(self.line) == 0 and self._has_spare(slo, predicted, now_s, num_answers):
            return Admit(unpromised)
        return self._in_line(unpromised, now_s)

    def _by_wake(self, slo: Slo, awaited: Awaited, now_s: float) -> Wait | Refuse:
        self._presence.seen(slo, now_s)
        slack = self._slack_of(slo).ttft(slo.ttft_s, awaited)
        has_time = not slo.ttft_s or not slack.exceeds(self._presence.share(slo, now_s))
        if is_possible(slo, awaited) and has_time:
            return self._in_line(slo, now_s, awaited.wake_s)
        if not awaited.is_ordered or awaited.prompt_s >= slo.ttft_s:
            return self._in_line(self._unpromised(slo), now_s, awaited.wake_s)
        error = SloUnreachable(
            f"{_WHAT['ttft']} must be within {slo.ttft_s:.3g} s for class {slo.name!r}, but "
            f"{awaited.ttft_s:.3g} s are predicted: the model is awake in {awaited.wake_s:.3g} s, "
            f"and prompts of {awaited.queue_s:.3g} s go before; try again then",
            awaited.wake_s + awaited.queue_s,
        )
        return Refuse("ttft", error)

    def _in_line(self, waits_as: Slo, now_s: float, wake_s: float = 0.0) -> Wait | Refuse:
        """Return whether there is a place; nobody leaves the line in the next `wake_s`."""
        if not self.line.is_full(waits_as):
            return Wait(keeps_promise=has_promise(waits_as))
        error = Overloaded(
            f"the queue of requests that wait is full: it has {len(self.line)}, of which "
            f"{self.line.num_waiting(waits_as)} belong to {waits_as.payer}",
            wake_s + self.line.advance_s(waits_as, now_s),
        )
        return Refuse("waiting", error)

    def _unpromised(self, slo: Slo) -> Slo:
        return without_promise(slo, self._lowest_priority)

    def _unreachable(
        self, slo: Slo, slack: Slack, fits_s: float, tpot_within_s: Callable[[float], float | None]
    ) -> SloUnreachable:
        if slack.reason == "ttft":
            retry_after_s: float | None = slack.used_s - fits_s  # the queue drains as time passes
        else:
            factor = self._slack_of(slo).tpot_margin.factor
            retry_after_s = tpot_within_s(slack.idle_s + fits_s / factor)
        return SloUnreachable(
            f"{_WHAT[slack.reason]} must be within {slack.promised_s:.3g} s for class {slo.name!r} "
            f"or a class that it must not delay, but {slack.idle_s + slack.used_s:.3g} s are "
            f"predicted; try again when the prediction is {slack.idle_s + fits_s:.3g} s",
            UNFORESEEN_S if retry_after_s is None else retry_after_s,
        )

    def _has_spare(
        self, slo: Slo, predicted: PredictedTimes, now_s: float, num_answers: int
    ) -> bool:
        """Return whether a request without a promise leaves those with one enough of theirs."""
        if not self._in_flight.has_place(num_answers, slo.tenant):
            return False
        slacks, tightest = self._slack_of(slo), self.tightest(now_s)
        if tightest is None:
            return slacks.queue_s(predicted) <= BACKLOG_S
        ttft_s, tpot_s = tightest
        # Its own prefill has a lower priority, so it does not count into their wait.
        is_queue_short = slacks.queue_s(predicted) <= SPARE_SHARE * ttft_s
        slack = slacks.tpot(tpot_s, predicted)
        # Slack 0: even alone it would break this TPOT, so waiting would block the line for ever.
        return is_queue_short and (slack.slack_s == 0 or not slack.exceeds(SPARE_SHARE))

    def _slack_of(self, slo: Slo) -> ClassSlack:
        return self._slacks.setdefault(slo.name, ClassSlack())
