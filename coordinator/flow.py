"""The only place where a request is dispatched, finished, failed or cancelled.

The router places each arriving request and predicts its latency. From the prediction, admission
decides whether both legs are sent at once, the request waits in line, or it is refused. The line is
served again whenever something has changed: a prefill or a request has ended, or a node has
reported its load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from msgspec import structs

from coordinator.admission import Admission, Admit, Refuse, WaitingLine
from coordinator.admission.promises import has_promise
from coordinator.generation import GenerationRequest
from coordinator.legs import send_legs, send_sibling_leg
from coordinator.prefix_watch import PrefixWatch
from coordinator.prompt_hashes import PromptHashes
from coordinator.registry import Member, Registry
from coordinator.routing import Placement, Router
from coordinator.running import Dispatch, RunningRequest, slo_left
from coordinator.status import describe_nodes, describe_waiting, waiting_by_class
from pdserve.clock import Clock, SystemClock
from pdserve.errors import ContextLengthExceeded, NodeLost, NoNodeAvailable, from_code
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import (
    KvEvents,
    LegFailed,
    NodeState,
    PhaseTimes,
    Slo,
    TokenBatch,
    TokenEvent,
)

log = logging.getLogger(__name__)

LINE_GAP_S = 0.005  # from the first event to serving the line; events in between share one pass
MAX_ATTEMPTS = 2  # dispatches of a request whose node is lost before it has sent anything


class Flow:
    """All requests in flight (`coordinator.generation.Generator`)."""

    def __init__(
        self,
        registry: Registry,
        router: Router,
        admission: Admission[RunningRequest],
        metrics: CoordinatorMetrics,
        *,
        model: str,
        request_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._registry = registry
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._model = model
        self._request_s = request_s
        self._clock = clock or SystemClock()
        self._running: dict[str, RunningRequest] = {}
        self._next_look: asyncio.TimerHandle | None = None  # when the line is served next
        self._prefix_watch = PrefixWatch(metrics, self._clock)
        metrics.watch("waiting_requests", "Requests that wait for room", lambda: len(self._line))
        metrics.watch_each(
            "slo_waiting_requests",
            "Of these, by class",
            "slo_class",
            lambda: waiting_by_class(self._line),
        )
        metrics.watch(
            "waiting_payers",
            "Classes, or tenants within one, whose requests wait for room",
            lambda: self._line.num_payers,
        )
        registry.on_lost(self._member_lost)
        registry.on_changed(lambda member: self._look_at_line())

    @property
    def num_inflight(self) -> int:
        """Number of requests that have started and not ended, including those in line."""
        return len(self._running)

    @property
    def max_model_len(self) -> int | None:
        """The most tokens per request that every member can hold; None without members."""
        return min((m.hello.max_model_len for m in self._registry), default=None)

    @property
    def max_inflight(self) -> int:
        """See Generator.max_inflight."""
        return self._admission.max_inflight

    def is_ready(self) -> bool:
        """Return whether a request started now could be served."""
        return self._router.can_route()

    def status(self) -> dict[str, object]:
        """Return the state of both pools, for GET /status."""
        return {
            "model": self._model,
            "mode": self._router.mode,
            "ready": self.is_ready(),
            "inflight": sum(r.dispatch is not None for r in self._running.values()),
            "waiting": len(self._line),
            "waiting_by_class": describe_waiting(self._line, self._clock.now()),
            "refused": dict(self._admission.num_refused),
            "prefixes": self._prefix_watch.status(),
            "nodes": describe_nodes(self._registry, self._router),
        }

    def start(self, request: GenerationRequest) -> RunningRequest:
        """Dispatch both legs, or queue the request until there is room.

        Raises the same errors as `start_siblings`.
        """
        return self.start_siblings([request])[0]

    def start_siblings(self, requests: Sequence[GenerationRequest]) -> list[RunningRequest]:
        """Dispatch several answers to one prompt, or queue them until there is room.

        Raises:
            SloUnreachable: the request is predicted to miss the promise of its class.
            Overloaded: too many requests are in flight or waiting.
            NoNodeAvailable: a pool is empty.
            ContextLengthExceeded: the request cannot fit.
        """
        request = requests[0]
        self._check_length(request)
        is_reusable = request.sampling.reuses_prefix
        prompt = PromptHashes(request.token_ids, request.cache_salt, is_reusable=is_reusable)
        placement = self._place(request, prompt)
        now_s = self._clock.now()
        deadline_s = min(request.deadline_s or self._request_s, self._request_s)
        decision = self._admission.decide(
            slo_left(request, deadline_s, 0.0),
            placement,
            now_s,
            partial(self._router.tpot_within_s, placement),
            len(requests),
        )
        if isinstance(decision, Refuse):
            name = request.slo.name
            self._metrics.refused.labels(slo_class=name, reason=decision.reason).inc()
            raise decision.error
        answers = [RunningRequest(r, prompt, now_s, deadline_s, self._ended) for r in requests]
        self._running |= {answer.request.request_id: answer for answer in answers}
        running, *running.siblings = answers
        self._metrics.prompt_tokens.inc(len(request.token_ids))
        if isinstance(decision, Admit):
            self._dispatch(running, placement, decision.slo)
        else:
            self._admission.wait(request.request_id, running, request.slo, now_s)
        return answers

    # ---- messages from nodes -------------------------------------------------------------------

    def tokens(self, batch: TokenBatch, sender: Member) -> None:
        """Deliver the tokens of a node's finished step.

        Raises:
            MalformedMessage: see TokenBatch.each.
        """
        num_tokens = 0
        for event in batch.each():
            running = self._running.get(event.request_id)
            if running is None or running.dispatch is None:
                continue  # the request has ended in the meantime
            if event.index == 0 and not running.has_token_one:
                self._prefilled(event, running, running.dispatch, sender)
            num_tokens += len(event.token_ids)
            if event.times is not None:
                self._observe_times(event.times, running.dispatch, sender)
            running.deliver(event, sender)
        self._metrics.output_tokens.inc(num_tokens)

    def kv_events(self, events: KvEvents, sender: Member) -> None:
        """Update the prefix index with blocks that a node has stored or evicted.

        Raises:
            MalformedMessage: see PrefixIndex.apply.
        """
        self._router.prefixes.apply(sender, events)

    def leg_failed(self, failure: LegFailed, sender: Member) -> None:
        """Fail a request because a node has failed its leg."""
        running = self._running.get(failure.request_id)
        if running is not None:
            error = from_code(failure.code, f"{sender.node_id}: {failure.message}")
            log.warning("%s failed: %s", failure.request_id, error)
            running.end(error)

    def _member_lost(self, member: Member) -> None:
        if member.load.state is not NodeState.DRAINING:
            self._metrics.nodes_lost.labels(role=member.role.name.lower()).inc()
        num_sent_again = 0
        for running in list(self._running.values()):
            dispatch = running.dispatch
            if dispatch is None:
                continue
            if member in dispatch.members and self._goes_again(running, dispatch):
                num_sent_again += 1
                continue
            if dispatch.decode is member:
                running.end(NodeLost(f"{member.node_id}, which was decoding, is gone"))
            elif dispatch.prefill is member and not running.has_token_one:
                running.end(NodeLost(f"{member.node_id}, which was prefilling, is gone"))
            # Otherwise the decode node has all the KV it needs, or will fail its leg itself.
        if num_sent_again:
            log.info("%d prompts of %s went to other nodes", num_sent_again, member.node_id)

    # ---- the line ------------------------------------------------------------------------------

    @property
    def _line(self) -> WaitingLine[RunningRequest]:
        return self._admission.line

    def _look_at_line(self) -> None:
        """Schedule serving the line soon, so that events until then share one pass."""
        if len(self._line) and self._next_look is None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(LINE_GAP_S, self._serve_line)

    def _serve_line(self) -> None:
        self._next_look = None
        while (running := self._line.head) is not None:
            try:
                placement = self._place(running.request, running.prompt)
            except NoNodeAvailable:
                return  # the request waits for a node to return, until its deadline
            now_s = self._clock.now()
            num_answers = 1 + len(running.siblings_to_begin)
            decision = self._admission.reconsider(
                running.slo_left(now_s), placement, now_s, num_answers
            )
            if not isinstance(decision, Admit):
                return
            self._line.leave(running.request.request_id)
            waited = self._metrics.class_waited.labels(slo_class=running.request.slo.name)
            waited.observe(running.waited_s(now_s))
            self._dispatch(running, placement, decision.slo)

    # ---- parts ---------------------------------------------------------------------------------

    def _check_length(self, request: GenerationRequest) -> None:
        limit = self.max_model_len
        wanted = len(request.token_ids) + request.sampling.max_tokens
        if limit is not None and wanted > limit:
            raise ContextLengthExceeded(
                f"{len(request.token_ids)} prompt tokens and max_tokens "
                f"{request.sampling.max_tokens} make {wanted}; this model's limit is {limit}"
            )

    def _place(self, request: GenerationRequest, prompt: PromptHashes) -> Placement:
        started_s = perf_counter()
        placement = self._router.place_hashed(request, prompt)
        self._metrics.decision.observe(perf_counter() - started_s)
        return placement

    def _dispatch(self, running: RunningRequest, placement: Placement, slo: Slo) -> None:
        """Send the legs of a request.

        Its siblings are sent with it if the prompt is handed off after its prefill. Otherwise they
        start when token 1 arrives (`_follow`).
        """
        request = running.request
        self._book(running, placement, slo)
        is_shared = placement.prefill is not None and not request.ends_with_prompt
        siblings = running.siblings_to_begin
        if not is_shared:
            self._admission.will_follow(s.request.request_id for s in siblings)
            siblings = []
        send_legs(request, placement, slo, self._router, [s.request for s in siblings])
        for sibling in siblings:
            beside = self._router.place_sibling(sibling.request, placement)
            self._book(sibling, beside, slo)
            send_sibling_leg(sibling.request, request.request_id, beside, slo, self._router)

    def _follow(self, running: RunningRequest, slo: Slo) -> None:
        """Dispatch a sibling whose prompt has already been computed for the first answer.

        Only the rest of a block is left to prefill. `slo` is the promise that the first answer was
        admitted with; the sibling gets what is left of it now.
        """
        try:
            placement = self._place(running.request, running.prompt)
        except NoNodeAvailable as error:
            running.end(error)
            return
        self._dispatch(running, placement, _left_of(slo, running.slo_left(self._clock.now())))

    def _book(self, running: RunningRequest, placement: Placement, slo: Slo) -> None:
        request, now_s = running.request, self._clock.now()
        running.dispatch = Dispatch(self._router.dispatched(request, placement), now_s, slo)
        running.num_attempts += 1
        self._admission.dispatched(request.request_id, slo, placement, now_s)
        self._metrics.placements.labels(side=placement.side).inc()

    def _goes_again(self, running: RunningRequest, lost: Dispatch) -> bool:
        """Dispatch a request again after its node was lost; return whether that was possible.

        Only requests that end with their prompt can be sent again: nothing has been shown to their
        client yet. After MAX_ATTEMPTS lost nodes a request is given up, since it may be the cause
        of the crashes.
        """
        request = running.request
        if not request.ends_with_prompt or running.num_attempts >= MAX_ATTEMPTS:
            return False
        try:
            placement = self._place(request, running.prompt)
        except NoNodeAvailable:
            return False
        now_s = self._clock.now()
        lost.booking.end(by_itself=False)
        self._admission.ended(request.request_id, now_s)
        self._dispatch(running, placement, _left_of(lost.slo, running.slo_left(now_s)))
        return True

    def _prefilled(
        self, event: TokenEvent, running: RunningRequest, dispatch: Dispatch, sender: Member
    ) -> None:
        """Handle token 1: start siblings, then show it or hold it back."""
        request, now_s = running.request, self._clock.now()
        placement = dispatch.booking.placement
        block_size = sender.hello.layout.block_size
        if request.sampling.reuses_prefix and not placement.shares_prefill:
            self._prefix_watch.prefilled(
                request.token_ids, block_size, request.cache_salt, event.cached_tokens
            )
        for sibling in running.siblings_to_begin:
            self._follow(sibling, dispatch.slo)
        self._look_at_line()
        shown = partial(self._shown, request.request_id, dispatch)
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

    def _ended(self, running: RunningRequest, by_itself: bool) -> None:
        request_id = running.request.request_id
        del self._running[request_id]
        self._line.leave(request_id)
        num_tokens = running.num_tokens if by_itself else 0
        self._admission.ended(request_id, self._clock.now(), num_tokens)
        self._look_at_line()

    def _observe_times(self, times: PhaseTimes, dispatch: Dispatch, sender: Member) -> None:
        if dispatch.prefill is sender or dispatch.prefill is None:
            self._metrics.observe_prefill_leg(times)
        if dispatch.decode is sender:
            was_handed_off = dispatch.prefill is not None
            self._metrics.observe_decode_leg(times, was_handed_off=was_handed_off)


def _left_of(admitted: Slo, left: Slo) -> Slo:
    """Return what is left of a promise; a request admitted without one keeps only its deadline."""
    return left if has_promise(admitted) else structs.replace(admitted, deadline_s=left.deadline_s)
