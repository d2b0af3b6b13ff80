"""All requests in flight: begins, fails and cancels them, and passes nodes' messages to them.

The router places each arriving request and predicts its latency. From the prediction, admission
decides whether both legs are sent at once (`dispatcher`), the request waits in line
(`line_keeper`), or it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import structs

from coordinator.admission import Admission, Admit, Refuse, Wait
from coordinator.admission.slack import promise_left
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.prefixes.index import PromptHashes
from coordinator.prefixes.stability import PrefixWatch
from coordinator.requests.claims import Claims
from coordinator.requests.departures import Departures
from coordinator.requests.dispatcher import Dispatcher, FirstTokens
from coordinator.requests.journey import Journey
from coordinator.requests.legs import error_of, is_of_the_request, lost
from coordinator.requests.line_keeper import LineKeeper
from coordinator.requests.moves import Moves
from coordinator.requests.once_per_cause import OncePerCause
from coordinator.requests.resumes import Resumes
from coordinator.requests.running import Dispatch, RunningRequest
from coordinator.requests.surroundings import FlowProcess, FlowTimes, WantedNodes
from coordinator.routing import Placement, Router
from coordinator.status import (
    describe_nodes,
    describe_waiting,
    watch_line,
    watch_nodes,
    watch_router,
)
from pdserve._native import add_tokens
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import (
    Claimed,
    KvEvents,
    LegFailed,
    PhaseTimes,
    Prefetched,
    Slo,
    TokenBatch,
    TokenEvent,
    is_long,
)
from pdserve.protocol.status import ClusterStatus
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import ContextLengthExceeded, NoNodeAvailable, PdserveError, from_code

log = logging.getLogger(__name__)


_ANY_NODES: Final = WantedNodes()
_NO_PROCESS: Final = FlowProcess()


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
        times: FlowTimes,
        clock: Clock | None = None,
        max_model_len: int | None = None,
        wanted: WantedNodes = _ANY_NODES,
        process: FlowProcess = _NO_PROCESS,
    ) -> None:
        """`max_model_len`: what its files allow, until a node says its own; None: unknown."""
        self._registry = registry
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._model = model
        self._request_s = times.request_s
        self._clock = clock or SystemClock()
        self._wanted = wanted
        self._process = process
        self._running: dict[str, RunningRequest] = {}
        self._max_model_len = max_model_len
        self._prefix_watch = PrefixWatch(metrics, self._clock)
        self._dispatcher = Dispatcher(
            router, admission, metrics, self._clock, wanted.adapter_missing
        )
        self._by_leg = self._dispatcher.by_leg
        self.resumes = Resumes(
            registry, self._dispatcher, metrics, self._clock, times.resume_s, wanted.comes_back
        )
        self._claims = Claims(registry, times.answer_s)
        self._troubles = OncePerCause(log, self._clock)
        self._moves = Moves(
            registry, self._dispatcher, metrics, self._clock, times.takeover_s, times.prefetch_s
        )
        self._first_tokens = FirstTokens(admission, self._prefix_watch, metrics, self._clock)
        self._line_keeper = LineKeeper(
            admission,
            self._dispatcher,
            self._claims,
            metrics,
            self._clock,
            times.line_gap_s,
            waits_for_nodes=wanted.are_awaited,
            wait_for_adapter=self._wait_for_adapter,
        )
        watch_line(admission.line, metrics)
        watch_nodes(registry, metrics)
        watch_router(router, metrics)
        metrics.watch("inflight_requests", "Requests on the nodes", lambda: self.num_on_nodes)
        metrics.watch("ready", "1: a request that arrives now can be served", self.is_ready)
        Departures(registry, router, self._by_leg, self.resumes, self._moves, metrics)
        registry.on_joined(self._note_lengths)
        registry.on_lost(self._note_lengths)
        registry.on_changed(lambda member: self._line_keeper.look())
        registry.on_lost(lambda member: self._line_keeper.look())

    @property
    def num_inflight(self) -> int:
        """Number of requests that have started and not ended, including those in line."""
        return len(self._running)

    @property
    def num_on_nodes(self) -> int:
        """Number of these that have been dispatched."""
        return sum(running.dispatch is not None for running in self._running.values())

    @property
    def max_model_len(self) -> int | None:
        """The most tokens per request that every member can hold, or that the last ones could.

        Before there was any, what the model's files say, if they were read; else None.
        """
        return self._max_model_len

    def _note_lengths(self, _: Member) -> None:
        lengths = [member.hello.max_model_len for member in self._registry]
        self._max_model_len = min(lengths, default=self._max_model_len)

    @property
    def max_inflight(self) -> int:
        """See Generator.max_inflight."""
        return self._admission.max_inflight

    def uses(self, adapter: str) -> bool:
        """Return whether a request in flight needs this adapter."""
        return any(r.request.prompt.adapter == adapter for r in self._running.values())

    def is_ready(self) -> bool:
        """Return whether a request started now could be served, perhaps once nodes have come."""
        return self._router.can_route() or self._wanted.are_awaited

    def status(self) -> ClusterStatus:
        """Return the state of both pools, for GET /status."""
        return ClusterStatus(
            model=self._model,
            mode=self._router.mode,
            ready=self.is_ready(),
            wake_s=self._wanted.wake_s(),
            coordinators=self._registry.num_coordinators,
            inflight=self.num_on_nodes,
            waiting=len(self._admission.line),
            waiting_by_class=describe_waiting(self._admission.line, self._clock.now()),
            refused=dict(self._admission.num_refused.items()),
            prefixes=self._prefix_watch.status(),
            nodes=describe_nodes(self._registry, self._router),
            coordinator=self._process.describe(),
        )

    def look(self) -> None:
        """Serve the line soon: something outside has changed that requests may wait for."""
        self._line_keeper.look()

    def refuse_line(self, seconds: float) -> None:
        """End the requests in line if no node is there: for so long none can become the model's."""
        self._line_keeper.refuse(seconds)

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
            NoNodeAvailable: a pool is empty, and the request does not wait for nodes.
            ContextLengthExceeded: the request cannot fit.
            RequestQuarantined: nodes have died of its prompt lately.
        """
        requests = self._as_sent(requests)
        request, now_s = requests[0], self._clock.now()
        self.resumes.quarantine.check(request)
        hashes = PromptHashes(request.prompt, is_reusable=request.sampling.reuses_prefix)
        deadline_s = min(request.deadline_s or self._request_s, self._request_s)
        left = promise_left(request, deadline_s, 0.0)
        found, decision = self._decide(request, hashes, left, now_s, len(requests))
        answers = [RunningRequest(r, hashes, now_s, deadline_s, self._ended) for r in requests]
        self._running |= {answer.request_id: answer for answer in answers}
        running, *running.siblings = answers
        self._metrics.prompt_tokens.inc(request.prompt.num_tokens)
        if isinstance(found, NoNodeAvailable) and self._dispatcher.lacks_adapter(request):
            slo = request.slo
            self._admission.will_follow((answer.request_id for answer in answers), slo)
            if not request.is_claimable:
                self._postpone(running, slo, found)
        elif isinstance(decision, Wait):
            running.keeps_promise = decision.keeps_promise
            slo = self._admission.wait(running.request_id, running, request.slo, now_s, decision)
            self._line_keeper.look()
        elif request.is_claimable:
            slo = decision.slo
            self._admission.will_follow((answer.request_id for answer in answers), slo)
        else:
            assert isinstance(found, Placement), "only what has a place is admitted"
            slo = decision.slo
            self._dispatcher.dispatch(running, found, slo)
            self._moves.look()  # streams beside its prompt may be late
        if request.is_claimable:
            self._claims.ask(answers, partial(self._begin, answers, slo))
        self._process.on_load(len(self._running), len(self._admission.line))
        return answers

    def _as_sent(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        """Return requests of one revision, told to be long if they are.

        Raises ContextLengthExceeded.
        """
        if revision := self._wanted.revision_of(requests[0]):
            requests = [structs.replace(request, revision=revision) for request in requests]
        self._check_length(requests[0])
        if self._is_long(requests[0]):
            prompt = structs.replace(requests[0].prompt, is_long=True)
            requests = [structs.replace(request, prompt=prompt) for request in requests]
        return requests

    def _decide(
        self,
        request: GenerationRequest,
        hashes: PromptHashes,
        left: Slo,
        now_s: float,
        num_answers: int,
    ) -> tuple[Placement | NoNodeAvailable, Admit | Wait]:
        """Return where a request could go now, or why nowhere, and whether it does or waits.

        Raises as `start_siblings`.
        """
        decision: Admit | Wait | Refuse
        found: Placement | NoNodeAvailable
        try:
            found = self._dispatcher.place(request, hashes)
        except NoNodeAvailable as error:
            if not (self._wanted.are_awaited or request.wait_s):
                raise
            found = error.with_traceback(None)  # which would keep all that is here
            is_asleep = not self._dispatcher.lacks_adapter(request)
            awaited = self._wanted.until_awake(left, request.prompt) if is_asleep else None
            decision = self._admission.decide_without_nodes(left, awaited, now_s, num_answers)
        else:
            within_s = partial(self._router.tpot_within_s, found)
            decision = self._admission.decide(left, found, now_s, within_s, num_answers)
        if isinstance(decision, Refuse):
            self._metrics.refused.labels(slo_class=request.slo.name, reason=decision.reason).inc()
            raise decision.error
        return found, decision

    def _wait_for_adapter(self, running: RunningRequest, error: NoNodeAvailable) -> None:
        """Have a request that was in line wait beside it until nodes have loaded its adapter."""
        answers = [running, *running.siblings_to_begin]
        self._admission.will_follow((answer.request_id for answer in answers), running.request.slo)
        self._postpone(running, running.request.slo, error)

    def _postpone(self, running: RunningRequest, slo: Slo, error: NoNodeAvailable) -> None:
        lacks_adapter = self._dispatcher.lacks_adapter(running.request)
        wait_s = (running.request.wait_s or self._request_s) if lacks_adapter else None
        self.resumes.postpone(running, slo, error, wait_s)

    def _begin(self, answers: Sequence[RunningRequest], slo: Slo) -> None:
        """Send what no node had, when it is its turn, and what is to go on, now."""
        first, left = answers[0], [answer for answer in answers if not answer.has_ended]
        if first.has_ended or any(answer.has_token_one for answer in answers):
            first.siblings = ()  # from here on each is on its own
            self._admission.line.leave(first.request_id)
            self._admission.will_follow((answer.request_id for answer in left), slo)
            for answer in left:
                error = NoNodeAvailable("no node could take the request in time: send it again")
                self.resumes.postpone(answer, slo, error)
        elif first.request_id in self._admission.line:
            self._line_keeper.look()
        else:
            self._dispatch_new(first, slo)

    def _dispatch_new(self, running: RunningRequest, slo: Slo) -> None:
        """Send a request that was admitted some time ago, with its siblings."""
        try:
            placement = self._dispatcher.place(running.request, running.hashes)
        except NoNodeAvailable as error:
            self._postpone(running, slo, error)
            return
        self._dispatcher.dispatch(running, placement, self._dispatcher.slo_left(running, slo))
        self._moves.look()  # streams beside its prompt may be late

    # ---- messages from nodes -------------------------------------------------------------------

    def tokens(self, batch: TokenBatch, sender: Member) -> None:
        """Deliver a step's tokens; most are of open runs. Raises as TokenBatch.check."""
        batch.check()
        num_told = sum(self._deliver(event, sender) for event in batch.events)
        columns = batch.request_ids, batch.indices, batch.token_ids
        begun, left, num_added = add_tokens(self._by_leg, *columns, self._clock.now())
        for running in begun:
            running.tell()
        num_told += sum(self._deliver(batch.plain(row), sender) for row in left)
        self._metrics.output_tokens.inc(num_told + num_added)

    def _deliver(self, event: TokenEvent, sender: Member) -> int:
        """Deliver tokens with all that is said of them, and return how many there were."""
        running = self._by_leg.get(event.request_id)
        if running is None or running.dispatch is None:
            return 0  # the request has ended in the meantime, or goes on elsewhere
        if event.index == 0 and not running.has_token_one:
            self._prefilled(event, running, running.dispatch, sender)
        elif event.index == 1:
            self._moves.look()  # it can flow from now on
            if (pair := running.dispatch.handed_off) is not None:
                self._router.health.worked(*pair)
        if event.times is not None:
            self._observe_times(event.times, running.dispatch, sender)
            running.journey.reported(event.times, sender.node_id)
        if event.is_taken_over:
            self._taken_over(event, running, sender)
        else:
            running.deliver(event, sender)
        return len(event.token_ids)

    def kv_events(self, events: KvEvents, sender: Member) -> None:
        """Update the index with blocks that were stored or evicted. Raises as PrefixIndex.apply."""
        self._router.prefixes.apply(sender, events)

    def leg_failed(self, failure: LegFailed, sender: Member) -> None:
        """End a request because of what it is, or send it again because of what its node is."""
        running = self._by_leg.get(failure.request_id)
        if running is None or running.dispatch is None:
            return
        error = from_code(failure.code, f"{sender.node_id}: {failure.message}")
        if failure.request_id != running.request.request_id:
            log.info("%s stays where it is for now: %s", running.request_id, error)
            self._moves.failed(running)
            return
        if (pair := running.dispatch.handed_off) is not None:
            self._router.health.failed(*pair, error)
        if is_of_the_request(error):
            log.warning("%s failed: %s: %s", failure.request_id, failure.code, error)
            running.end(error_of(failure))
        else:
            self._troubles.note((sender.node_id, failure.code), f"{failure.request_id}: {error}")
            is_step = type(error) is PdserveError  # and no transfer, or lack of room
            self.resumes.interrupted(
                running, error_of(failure), failure.code, failure.request_id if is_step else ""
            )

    def prefetched(self, message: Prefetched, sender: Member) -> None:
        """Move a stream whose KV has been fetched by the node that it is to move to."""
        self._moves.prefetched(message, sender)

    def claimed(self, message: Claimed, sender: Member) -> None:
        """Note what a node has of a request that another coordinator had begun."""
        self._claims.claimed(message, sender)

    # ---- parts ---------------------------------------------------------------------------------

    def _check_length(self, request: GenerationRequest) -> None:
        limit = self.max_model_len
        wanted = request.prompt.num_tokens + request.sampling.max_tokens
        if limit is not None and wanted > limit:
            raise ContextLengthExceeded(
                f"{request.prompt.num_tokens} prompt tokens and max_tokens "
                f"{request.sampling.max_tokens} make {wanted}; this model's limit is {limit}"
            )

    def _is_long(self, request: GenerationRequest) -> bool:
        """Whether it is a long one for the model, whose nodes all say the same."""
        short_len = next((member.hello.short_len for member in self._registry), 0)
        return is_long(request.prompt.num_tokens + request.sampling.max_tokens, short_len)

    def _prefilled(
        self, event: TokenEvent, running: RunningRequest, dispatch: Dispatch, sender: Member
    ) -> None:
        """Handle token 1, before it is delivered: its prompt's siblings can begin now."""
        running.journey.token_one(event.cached_tokens, self._clock.now())
        for sibling in running.siblings_to_begin:
            try:
                self._dispatcher.follow(sibling, dispatch.slo)
            except NoNodeAvailable as error:
                self.resumes.postpone(sibling, dispatch.slo, error)
        self._line_keeper.look()
        self._first_tokens.arrived(event, running, dispatch, sender)

    def _taken_over(self, event: TokenEvent, running: RunningRequest, sender: Member) -> None:
        """Handle a stream's last token on the node where it was."""
        if self._moves.taken_over(event, running, sender):
            return
        running.deliver(event, sender)
        if not running.has_ended:  # whoever was to take it over has been lost since
            self.resumes.interrupted(running, lost(has_token_one=True), "move_failed")

    def _ended(self, running: RunningRequest, by_itself: bool) -> None:
        request_id = running.request_id
        del self._running[request_id]
        self._by_leg.pop(running.request.request_id, None)
        self._dispatcher.end_takeover(running, "the request has ended")
        self.resumes.ended(running)
        if running.request.is_claimable:
            self._claims.ended(running)
        self._admission.line.leave(request_id)
        num_tokens = running.num_tokens if by_itself else 0
        now_s = self._clock.now()
        self._admission.ended(request_id, now_s, num_tokens)
        self._line_keeper.look()
        running.journey.num_tokens, running.journey.ended_s = running.num_tokens, now_s
        if running.dispatch is not None:
            self._observe_revision(running.journey, running.dispatch.booking.placement.revision)
        self._process.on_load(len(self._running), len(self._admission.line))
        self._process.on_ended(running.journey, running.hashes)

    def _observe_revision(self, journey: Journey, revision: str) -> None:
        """Record how a revision's nodes served a request, for who compares it with another."""
        metrics = self._metrics
        metrics.revision_requests.labels(revision, journey.error or "ok").inc()
        if journey.error:
            return
        if (ttft_s := journey.ttft_s) is not None:
            metrics.revision_ttft.labels(revision).observe(ttft_s)
        if (tpot_s := journey.tpot_s) is not None:
            metrics.revision_tpot.labels(revision).observe(tpot_s)

    def _observe_times(self, times: PhaseTimes, dispatch: Dispatch, sender: Member) -> None:
        if dispatch.computes_prompt is sender:
            self._metrics.observe_prefill_leg(times)
        if dispatch.decode is sender:
            was_handed_off = dispatch.prefill is not None
            self._metrics.observe_decode_leg(times, was_handed_off=was_handed_off)
