"""Serves the line of waiting requests whenever something has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from coordinator.admission import Admission, Admit
from coordinator.requests.claims import Claims
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.running import RunningRequest
from pdserve.metrics import CoordinatorMetrics
from pdserve.shared.clock import Clock
from pdserve.shared.errors import NoNodeAvailable


@dataclass(slots=True)
class _Saving:
    """Places that are saved up for a call with more answers than there are places.

    Those behind it go on meanwhile: for each place that they take, one is saved. So it waits for as
    many of theirs as it has answers, and not for all to stand still.
    """

    request_id: str = ""
    num_places: int = 0

    def of(self, request_id: str) -> int:
        """Return how many are saved for this call; a new one begins with none."""
        if self.request_id != request_id:
            self.request_id, self.num_places = request_id, 0
        return self.num_places


class EmptyPool:
    """Since when no call can be sent anywhere, and who has waited for that to end too long.

    Each waits in line as long as its class says: from then on, or from its own start.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._since_s: float | None = None

    def is_over(self) -> bool:
        """Return whether there are nodes, and note since when there are not."""
        if self._dispatcher.can_route:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._clock.now()
        return self._since_s is None

    def end_overdue(self, line: Iterable[RunningRequest]) -> float:
        """End whoever has waited for too long; returns the seconds until the next one will have."""
        assert self._since_s is not None, "there are nodes"
        now_s, next_s = self._clock.now(), inf
        for running in list(line):
            waited_s = min(now_s - self._since_s, running.waited_s(now_s))
            left_s = running.request.wait_s - waited_s
            if left_s > 0:
                next_s = min(next_s, left_s)
            elif not running.has_ended:  # with another answer to its prompt
                self._end(running)
        return next_s

    def _end(self, running: RunningRequest) -> None:
        try:
            self._dispatcher.place(running.request, running.hashes)
        except NoNodeAvailable as error:
            running.end(error.with_traceback(None))  # which would keep all that is here


_LATER_S = 0.01  # timers are rounded
_CANNOT_SERVE = (
    "nodes cannot become those of this model now, and their logs say why; it is tried again soon"
)
LINE_GAP_S = 0.005  # from the first event to serving the line; events in between share one pass


class LineKeeper:
    """Dispatches the head of admission's line for as long as there is room for it."""

    def __init__(
        self,
        admission: Admission[RunningRequest],
        dispatcher: Dispatcher,
        claims: Claims,
        metrics: CoordinatorMetrics,
        clock: Clock,
        gap_s: float = LINE_GAP_S,
        *,
        waits_for_nodes: bool = False,
        wait_for_adapter: Callable[[RunningRequest, NoNodeAvailable], None],
    ) -> None:
        """
        With `waits_for_nodes`, an empty pool is waited for until each call's deadline. What lacks
        no node but its adapter is given to `wait_for_adapter`, and holds nobody up.
        """
        self._wait_for_adapter = wait_for_adapter
        self._admission = admission
        self._dispatcher = dispatcher
        self._claims = claims
        self._metrics = metrics
        self._clock = clock
        self._gap_s = gap_s
        self._saving = _Saving()
        self._next_look: asyncio.TimerHandle | None = None  # when the line is served next
        self._empty_pool = None if waits_for_nodes else EmptyPool(dispatcher, clock)
        self._next_end: asyncio.TimerHandle | None = None  # when one has waited for too long

    def look(self) -> None:
        """Serve the line soon: a prefill or a request has ended, or a node has reported."""
        if len(self._admission.line) and self._next_look is None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(self._gap_s, self._serve)

    def refuse(self, seconds: float) -> None:
        """End whoever waits for nodes to become the model's: for so long none can.

        Where some are always its own, these are waited for.
        """
        if self._dispatcher.can_route or self._empty_pool is not None:
            return
        for running in list(self._admission.line):
            if not (running.has_ended or running.request_id in self._claims):
                running.end(NoNodeAvailable(_CANNOT_SERVE, seconds))

    def _serve(self) -> None:
        self._next_look = None
        line = self._admission.line
        if self._empty_pool is not None and not self._empty_pool.is_over():
            self._wait_for_nodes(self._empty_pool)
            return
        while (running := self._next()) is not None:
            try:
                placement = self._dispatcher.place(running.request, running.hashes)
            except NoNodeAvailable as error:
                if not self._dispatcher.lacks_adapter(running.request):
                    return  # the request waits for a node to return
                line.leave(running.request_id)
                self._wait_for_adapter(running, error)
                continue
            now_s = self._clock.now()
            left, num_answers = running.slo_left(now_s), _num_answers(running)
            decision = (
                Admit(left)  # with the wake counted in
                if running.keeps_promise
                else self._admission.reconsider(left, placement, now_s, num_answers)
            )
            if not isinstance(decision, Admit):
                return
            line.leave(running.request_id)
            waited = self._metrics.class_waited.labels(slo_class=running.request.slo.name)
            waited.observe(running.waited_s(now_s))
            self._dispatcher.dispatch(running, placement, decision.slo)

    def _wait_for_nodes(self, pool: EmptyPool) -> None:
        if self._next_end is not None:
            self._next_end.cancel()
        in_s = pool.end_overdue(self._admission.line)
        if in_s < inf:
            self._next_end = asyncio.get_running_loop().call_later(in_s + _LATER_S, self.look)

    def _next(self) -> RunningRequest | None:
        """The head of the line, but for what cannot be sent now whatever room there is.

        Of some it is not known yet whether a node has them. Some have tenants with as many requests
        in flight as they may have: the places left free by this bound are for who waits behind. And
        the first that has more answers than there are places saves them up (`_Saving`).
        """
        admission, num_saved, is_saving = self._admission, 0, False
        for running in admission.line.heads():
            num_answers = _num_answers(running)
            is_at_bound = admission.is_at_bound(running.request.slo, num_answers)
            if running.request_id in self._claims or is_at_bound:
                continue
            if admission.fits(num_answers + num_saved):
                self._saving.num_places += num_answers if is_saving else 0
                return running
            if not is_saving:
                num_saved, is_saving = self._saving.of(running.request_id), True
        return None


def _num_answers(running: RunningRequest) -> int:
    return 1 + len(running.siblings_to_begin)
