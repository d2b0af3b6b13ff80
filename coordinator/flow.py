"""The one place where a request is dispatched, ended, failed or cancelled.

Both legs are dispatched at once. Token 1 comes from the prefill node, the rest from the decode
node, over two streams; a request's events are put in order by their output index, so neither the
race between the two nor a repeated token is visible behind this file.

    start ──► token 1 (prefill node) ──► tokens 2.. (decode node) ──► finished
      └────────────┴───────────────────────────┴──► failed | cancelled, both legs told
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from coordinator.generation import GenerationRequest, Route
from coordinator.prefix_index import PrefixIndex, prefix_sources
from coordinator.registry import Member, Registry
from coordinator.router import LeastLoaded, Pair
from coordinator.status import describe_nodes
from pdserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    NodeLost,
    Overloaded,
    PdserveError,
    RequestCancelled,
    from_code,
)
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    KvEvents,
    LegFailed,
    NodeState,
    PrefillLeg,
    PrefixSource,
    TokenBatch,
    TokenEvent,
)

log = logging.getLogger(__name__)


class RunningRequest:
    """One request in flight (`coordinator.generation.Generation`)."""

    def __init__(self, flow: Flow, request: GenerationRequest, pair: Pair) -> None:
        self.request = request
        self.pair = pair
        self.route = Route(
            prefill_node=pair.prefill.node_id if pair.prefill else None,
            decode_node=pair.decode.node_id if pair.decode else None,
        )
        self._flow = flow
        self._events: asyncio.Queue[TokenEvent | PdserveError] = asyncio.Queue()
        self._early: dict[int, TokenEvent] = {}  # by index: arrived before their turn
        self._next_index = 0
        self._has_ended = False
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def has_token_one(self) -> bool:
        """Whether the prefill is over, as far as the client is concerned."""
        return self._next_index > 0

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Events in order; raises the error that ended the request early."""
        while True:
            event = await self._events.get()
            if isinstance(event, PdserveError):
                raise event
            yield event
            if event.finish_reason is not None:
                return

    async def cancel(self, reason: str) -> None:
        """Stop both legs."""
        self.end(RequestCancelled(reason))

    def deliver(self, event: TokenEvent, sender: Member) -> None:
        """Take tokens from a node, in whatever order they come."""
        if self._has_ended or event.index < self._next_index:
            return
        self._early[event.index] = event
        while (ready := self._early.pop(self._next_index, None)) is not None:
            self._next_index += len(ready.token_ids)
            self._events.put_nowait(ready)
            if ready.finish_reason is not None:
                self._finish(sender)
                return

    def end(self, error: PdserveError) -> None:
        """Fail or cancel: the client gets `error`, both nodes a cancel."""
        if self._has_ended:
            return
        self._events.put_nowait(error)
        for member in (self.pair.prefill, self.pair.decode):
            if member is not None:
                member.send(CancelLeg(request_id=self.request.request_id, reason=error.message))
        self._leave()

    def _finish(self, sender: Member) -> None:
        decode = self.pair.decode
        if decode is not None and decode is not sender:  # ended with token 1: nothing to decode
            decode.send(CancelLeg(request_id=self.request.request_id, reason="finished"))
        self._leave()

    def _leave(self) -> None:
        self._has_ended = True
        if self.deadline is not None:
            self.deadline.cancel()
        self._flow.forget(self)


class Flow:
    """All requests in flight (`coordinator.generation.Generator`)."""

    def __init__(
        self,
        registry: Registry,
        router: LeastLoaded,
        metrics: CoordinatorMetrics,
        *,
        model: str,
        max_inflight: int,
        request_s: float,
    ) -> None:
        self._registry = registry
        self._router = router
        self._metrics = metrics
        self._model = model
        self._max_inflight = max_inflight
        self._request_s = request_s
        self._running: dict[str, RunningRequest] = {}
        self._prefixes = PrefixIndex()
        registry.on_lost(self._prefixes.remove)
        registry.on_lost(self._member_lost)

    @property
    def num_inflight(self) -> int:
        """Requests started and not ended."""
        return len(self._running)

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of one request that every member can hold; None without members."""
        return min((m.hello.max_model_len for m in self._registry), default=None)

    def is_ready(self) -> bool:
        """Whether a request started now could be served."""
        return self._router.can_route()

    def status(self) -> dict[str, object]:
        """Both pools, for GET /status."""
        return {
            "model": self._model,
            "mode": self._router.mode,
            "ready": self.is_ready(),
            "inflight": self.num_inflight,
            "nodes": describe_nodes(self._registry),
        }

    def start(self, request: GenerationRequest) -> RunningRequest:
        """Dispatch both legs.

        Raises:
            Overloaded: too many requests in flight.
            NoNodeAvailable: a pool is empty.
            ContextLengthExceeded: the request cannot fit.
        """
        self._admit(request)
        pair = self._router.choose(request.sampling.max_tokens)
        running = RunningRequest(self, request, pair)
        self._running[request.request_id] = running
        deadline_s = request.deadline_s or self._request_s
        running.deadline = asyncio.get_running_loop().call_later(
            deadline_s, self._expire, running, deadline_s
        )
        self._dispatch(request, pair)
        self._metrics.prompt_tokens.inc(len(request.token_ids))
        return running

    def forget(self, running: RunningRequest) -> None:
        """A request has ended."""
        request_id = running.request.request_id
        del self._running[request_id]
        for member in (running.pair.prefill, running.pair.decode):
            if member is not None:
                member.pending_prompts.pop(request_id, None)
                member.decoding.discard(request_id)

    # ---- what nodes say ------------------------------------------------------------------------

    def tokens(self, batch: TokenBatch, sender: Member) -> None:
        """A node's step is over."""
        for event in batch.events:
            running = self._running.get(event.request_id)
            if running is None:
                continue  # ended meanwhile
            if event.index == 0:
                sender.pending_prompts.pop(event.request_id, None)
                self._metrics.cached_tokens.inc(event.cached_tokens)
            self._metrics.output_tokens.inc(len(event.token_ids))
            self._observe_times(event, running, sender)
            running.deliver(event, sender)

    def kv_events(self, events: KvEvents, sender: Member) -> None:
        """What a node holds has changed.

        Raises:
            MalformedMessage: as PrefixIndex.apply.
        """
        self._prefixes.apply(sender, events)

    def leg_failed(self, failure: LegFailed, sender: Member) -> None:
        """A node gave a leg up."""
        running = self._running.get(failure.request_id)
        if running is not None:
            error = from_code(failure.code, f"{sender.node_id}: {failure.message}")
            log.warning("%s failed: %s", failure.request_id, error)
            running.end(error)

    def _member_lost(self, member: Member) -> None:
        if member.load.state is not NodeState.DRAINING:
            self._metrics.nodes_lost.labels(role=member.role.name.lower()).inc()
        for running in list(self._running.values()):
            if running.pair.decode is member:
                running.end(NodeLost(f"{member.node_id}, which was decoding, is gone"))
            elif running.pair.prefill is member and not running.has_token_one:
                running.end(NodeLost(f"{member.node_id}, which was prefilling, is gone"))
            # Otherwise the decode node has all it needs, or fails its leg itself for lack of it.

    # ---- parts ---------------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> None:
        if len(self._running) >= self._max_inflight:
            raise Overloaded(f"{self._max_inflight} requests are in flight already")
        limit = self.max_model_len
        wanted = len(request.token_ids) + request.sampling.max_tokens
        if limit is not None and wanted > limit:
            raise ContextLengthExceeded(
                f"{len(request.token_ids)} prompt tokens and max_tokens "
                f"{request.sampling.max_tokens} make {wanted}; this model's limit is {limit}"
            )

    def _dispatch(self, request: GenerationRequest, pair: Pair) -> None:
        if pair.prefill is not None:
            pair.prefill.pending_prompts[request.request_id] = len(request.token_ids)
            pair.prefill.send(
                PrefillLeg(
                    request_id=request.request_id,
                    token_ids=request.token_ids,
                    sampling=request.sampling,
                    cache_salt=request.cache_salt,
                    handoff=pair.decode is not None,
                    prefix_sources=self._prefix_sources(request, pair.prefill),
                )
            )
        if pair.decode is not None:
            prefills = pair.prefill is None
            pair.decode.decoding.add(request.request_id)
            pair.decode.send(
                DecodeLeg(
                    request_id=request.request_id,
                    token_ids=request.token_ids,
                    sampling=request.sampling,
                    cache_salt=request.cache_salt,
                    source=pair.prefill.address_for(pair.decode) if pair.prefill else None,
                    prefix_sources=(self._prefix_sources(request, pair.decode) if prefills else []),
                )
            )

    def _prefix_sources(self, request: GenerationRequest, prefills: Member) -> list[PrefixSource]:
        """Who holds more of the prompt than the node that is to prefill it."""
        held = self._prefixes.longest_prefixes(request.token_ids, request.cache_salt)
        return prefix_sources(held, prefills, len(request.token_ids))

    def _expire(self, running: RunningRequest, deadline_s: float) -> None:
        running.end(DeadlineExceeded(f"the request was not complete within {deadline_s} s"))

    def _observe_times(self, event: TokenEvent, running: RunningRequest, sender: Member) -> None:
        if event.times is None:
            return
        if running.pair.prefill is sender or running.pair.prefill is None:
            self._metrics.observe_prefill_leg(event.times)
        if running.pair.decode is sender:
            was_handed_over = running.pair.prefill is not None
            self._metrics.observe_decode_leg(event.times, was_handed_over=was_handed_over)
