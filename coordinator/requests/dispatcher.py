"""Places requests on nodes and sends their legs: the first time, again, and for siblings.

When token 1 of a request arrives, it is shown to the client, or held back (`FirstTokens`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final

from msgspec import structs

from coordinator.admission import Admission
from coordinator.admission.slack import left_of
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.prefixes.index import PromptHashes
from coordinator.prefixes.stability import PrefixWatch
from coordinator.requests.legs import send_legs, send_sibling_leg, send_takeover_leg
from coordinator.requests.running import Dispatch, RunningRequest
from coordinator.routing import Placement, Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import CancelLeg, Prefetch, Slo, TokenEvent
from pdserve.shared.clock import Clock
from pdserve.shared.errors import NoNodeAvailable

_MOVES: Final = "it goes on elsewhere"


class Dispatcher:
    """Sends requests to nodes, and enters them in the books of routing and admission."""

    def __init__(
        self,
        router: Router,
        admission: Admission[RunningRequest],
        metrics: CoordinatorMetrics,
        clock: Clock,
        adapter_missing: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """`adapter_missing` is called with the adapter of a request that no node has now."""
        # What is on nodes, by its id there; a stream that is being taken over is there twice.
        self.by_leg: dict[str, RunningRequest] = {}
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._adapter_missing = adapter_missing

    @property
    def can_route(self) -> bool:
        """Whether there are nodes that a request could go to."""
        return self._router.can_route()

    def lacks_adapter(self, request: GenerationRequest) -> bool:
        """Return whether a request could be sent, had nodes its adapter."""
        adapter = request.prompt.adapter
        return bool(adapter) and self.can_route and not self._router.can_route(adapter=adapter)

    def place(self, request: GenerationRequest, prompt: PromptHashes) -> Placement:
        """Return where the request would go now. Raises NoNodeAvailable."""
        started_s = perf_counter()
        try:
            placement = self._router.place_hashed(request, prompt)
        except NoNodeAvailable:
            if self.lacks_adapter(request):
                self._adapter_missing(request.prompt.adapter)
            raise
        self._metrics.decision.observe(perf_counter() - started_s)
        return placement

    def dispatch(self, running: RunningRequest, placement: Placement, slo: Slo) -> None:
        """Send the legs of a request; its nodes have to keep the promise `slo`.

        Its siblings are sent with it if the prompt is handed off after its prefill. Otherwise they
        start when token 1 arrives (`follow`).
        """
        request = running.request
        self._book(running, placement, slo)
        is_shared = placement.prefill is not None and not request.ends_with_prompt
        siblings = running.siblings_to_begin
        if not is_shared:
            self._admission.will_follow((s.request_id for s in siblings), slo)
            siblings = []
        send_legs(request, placement, slo, self._router, [s.request for s in siblings])
        for sibling in siblings:
            beside = self._router.place_sibling(sibling.request, placement)
            self._book(sibling, beside, slo)
            send_sibling_leg(sibling.request, request.request_id, beside, slo, self._router)

    def follow(self, running: RunningRequest, slo: Slo) -> None:
        """Dispatch a sibling whose prompt has already been computed for the first answer.

        Only the rest of a block is left to prefill. `slo` is the promise that the first answer was
        admitted with; the sibling gets what is left of it now.

        Raises:
            NoNodeAvailable: it cannot be sent now.
        """
        placement = self.place(running.request, running.hashes)
        self.dispatch(running, placement, left_of(slo, running.slo_left(self._clock.now())))

    @property
    def flows(self) -> bool:
        """Whether streams may be `at_risk`: the mode is flowing."""
        return self._router.flowing is not None

    def place_elsewhere(self, running: RunningRequest) -> Placement | None:
        """Return where a running stream could go on, if there is a place for it."""
        return self._router.place_elsewhere(*running.rest())

    def at_risk(self) -> list[RunningRequest]:
        """Return the streams that should flow to other nodes, the most urgent first."""
        if self._router.flowing is None:
            return []
        streams = {r.dispatch.booking: r for r in self.by_leg.values() if r.dispatch is not None}
        return [streams[booking] for booking in self._router.flowing.at_risk(streams)]

    def ask_to_prefetch(self, running: RunningRequest, placement: Placement) -> None:
        """Have the node of this placement fetch the stream's KV, while it goes on where it is."""
        target = placement.decode
        assert target is not None
        request, _ = running.rest()
        target.send(
            Prefetch(
                request_id=request.request_id,
                prompt=request.context,
                prefix_sources=self._router.prefix_sources(placement, target),
            )
        )

    def move(self, running: RunningRequest, target: Member) -> None:
        """Take a stream from its node, and have `target` go on with it."""
        assert running.dispatch is not None
        slo = running.dispatch.slo
        self.withdraw(running, _MOVES)
        placement = self._router.place_on(running.request, running.hashes, target)
        self.dispatch(running, placement, self.slo_left(running, slo))

    def slo_left(self, running: RunningRequest, admitted: Slo) -> Slo:
        """Return what the next nodes of a request have to keep of the promise `admitted`.

        For one that goes on, the TTFT is that of its next token.
        """
        slo = left_of(admitted, running.slo_left(self._clock.now()))
        if not running.has_token_one:
            return slo
        return structs.replace(slo, ttft_s=admitted.tpot_s or admitted.ttft_s, hold_s=0.0)

    def withdraw(self, running: RunningRequest, reason: str) -> None:
        """Take a request from its nodes, and the siblings that wait for its prompt (`interrupt`).

        The siblings are sent again with it.
        """
        now_s = self._clock.now()
        for answer in (running, *running.depending):
            answer.journey.interrupted(reason, now_s)
            del self.by_leg[answer.request.request_id]
            self.end_takeover(answer, reason)
            self._admission.interrupted(answer.request_id)
            answer.interrupt(reason)

    # ---- a stream is taken over, while it runs -------------------------------------------------

    def begin_takeover(
        self, running: RunningRequest, placement: Placement, timer: asyncio.TimerHandle
    ) -> None:
        """Have the node of this placement take a stream over; it goes on where it is till then.

        It is booked on both nodes meanwhile.
        """
        dispatch = running.dispatch
        assert dispatch is not None
        assert dispatch.decode is not None
        request, _ = running.rest()
        slo = self.slo_left(running, dispatch.slo)
        # There is nothing to compute but its next token.
        placement = structs.replace(
            placement, uncached_tokens=0, shares_prefill=True, ttft_s=placement.tpot_s
        )
        booking = self._router.dispatched(request, placement, slo)
        booking.output = running.output
        running.begin_successor(Dispatch(booking, self._clock.now(), slo), timer)
        self.by_leg[request.request_id] = running
        takes_over = running.request.request_id
        send_takeover_leg(request, placement, slo, dispatch.decode, takes_over, self._router)

    def taken_over(self, running: RunningRequest) -> None:
        """Go on with a stream as its successor: it has ended on its former node."""
        successor = running.successor
        assert successor is not None
        successor.timer.cancel()
        del self.by_leg[running.request.request_id]
        running.journey.interrupted(_MOVES, self._clock.now())
        self._admission.interrupted(running.request_id)
        dispatch = running.succeed()
        self._sent(running, dispatch.booking.placement)

    def end_takeover(self, running: RunningRequest, reason: str) -> None:
        """Have nobody take a stream over any more, if somebody was to."""
        successor, running.successor = running.successor, None
        if successor is None:
            return
        successor.timer.cancel()
        request_id = successor.request.request_id
        del self.by_leg[request_id]
        successor.dispatch.booking.end(by_itself=False)
        successor.target.send(CancelLeg(request_id=request_id, reason=reason))

    # ---- parts ---------------------------------------------------------------------------------

    def _book(self, running: RunningRequest, placement: Placement, slo: Slo) -> None:
        request, now_s = running.request, self._clock.now()
        booking = self._router.dispatched(request, placement, slo)
        booking.output = running.output
        running.dispatch = Dispatch(booking, now_s, slo)
        self.by_leg[request.request_id] = running
        if running.request_id not in self._admission:  # else it is still the same request
            self._admission.dispatched(running.request_id, slo, placement, now_s)
        self._sent(running, placement)

    def _sent(self, running: RunningRequest, placement: Placement) -> None:
        self._metrics.placements.labels(side=placement.side).inc()
        running.journey.sent(
            placement.prefill.node_id if placement.prefill else "",
            placement.decode.node_id if placement.decode else "",
            self._clock.now(),
            is_resumed=running.has_token_one,
        )


class FirstTokens:
    """Records what token 1 says of the prefill, and when the client gets it."""

    def __init__(
        self,
        admission: Admission[RunningRequest],
        prefix_watch: PrefixWatch,
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._prefix_watch = prefix_watch
        self._metrics = metrics
        self._clock = clock

    def arrived(
        self, event: TokenEvent, running: RunningRequest, dispatch: Dispatch, sender: Member
    ) -> None:
        """Hold token 1 back, or record that it is shown now. Call before it is delivered."""
        request, now_s = running.request, self._clock.now()
        if request.sampling.reuses_prefix and not dispatch.booking.placement.shares_prefill:
            self._prefix_watch.prefilled(
                request.prompt, sender.hello.layout.block_size, event.cached_tokens
            )
        shown = partial(self._shown, running.request_id, dispatch)
        hold_s = dispatch.held_until_s - now_s
        goes_on = event.finish_reason is None and len(event.token_ids) > 0
        if goes_on and hold_s > 0 and dispatch.booking.has_to_wait:
            running.hold(hold_s, partial(self._held, now_s, shown))
        else:
            shown()

    def _held(self, since_s: float, shown: Callable[[], None]) -> None:
        self._metrics.held.observe(self._clock.now() - since_s)
        shown()

    def _shown(self, request_id: str, dispatch: Dispatch) -> None:
        """Record the TTFT: the client gets token 1 now."""
        now_s = self._clock.now()
        self._admission.first_token(request_id, now_s)
        predicted_s = dispatch.booking.placement.ttft_s
        if predicted_s > 0:
            self._metrics.ttft_ratio.observe((now_s - dispatch.at_s) / predicted_s)
