"""A prefill node's life of a request:

1. `start_prefill`: the leg arrives, is queued in the engine, its handoff is opened. It is let in
   when the prompts and the KV that waits to be pulled leave room for it (`prefill_node.scheduler`).
2. `step_done`, once per chunk: blocks that are complete are announced to whoever has subscribed.
   Of a large chunk, layers are announced as they are completed (`layers_done`).
3. `step_done`, last chunk: token 1 goes to the coordinator at once; then the handoff record is
   published. The engine lets go of the request; the handoff still holds its blocks.
4. The decode node pulls and settles (`handoff.settle`): the blocks are free.

A cancel, a failed step or a lost coordinator ends it at any of these points.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.engine import Engine, StepReport
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.errors import InvalidRequest, PdserveError, RequestCancelled, RequestEnded
from pdserve.lifecycle import Lifecycle
from pdserve.node.gauges import observe_step
from pdserve.node.legs import Legs
from pdserve.node.link import CoordinatorLink
from pdserve.node.prefix_queue import make_prefix_queue
from pdserve.node.roles import NodeParts, accepts, refuse
from pdserve.node.session_client import Sessions
from pdserve.protocol import DecodeLeg, HandoffRecord, PrefillLeg, TokenEvent
from prefill_node.handoff import Handoffs
from prefill_node.scheduler import FcfsBudget


class PrefillNode:
    """The role of a prefill node (`pdserve.node.roles.Role`)."""

    def __init__(self, parts: NodeParts) -> None:
        config, handoff, pool = parts.config.engine, parts.config.handoff, parts.pool
        num_kept_free = pool.num_blocks - int(pool.num_blocks * handoff.pinned_limit)
        policy = FcfsBudget(
            config.token_budget,
            config.max_batch_size,
            num_kept_free,
            lambda: self.handoffs.num_pinned_blocks,
        )
        self.engine = Engine(parts.pool, policy, parts.clock, parts.eos_token_ids)
        self.legs = Legs()
        self.announcer = self.handoffs = Handoffs(
            parts.exporter,
            pool,
            on_settled=self._settled,
            on_expired=self._expired,
            lease_s=parts.config.timeouts.lease_s,
            announce_bytes=handoff.announce_bytes,
        )
        self._parts = parts
        self.sessions = Sessions(
            parts.node_id,
            parts.incarnation,
            parts.identity,
            parts.puller,
            parts.clock,
            parts.config.timeouts,
        )
        self._prefixes = make_prefix_queue(parts, self.engine, self.sessions)
        self._watch()

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for decode nodes to pull."""
        return self.handoffs.num_pinned_blocks

    @property
    def num_waiting(self) -> int:
        """Prompts not begun yet."""
        return len(self.engine.queues.waiting) + len(self._prefixes)

    # ---- what coordinators ask for -------------------------------------------------------------

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        """Queue the prompt."""
        if not accepts(self._parts, self.legs, leg, link):
            return
        self.legs.open(leg.request_id, link)
        if leg.handoff:
            self.handoffs.open(leg.request_id)
        self._prefixes.submit(
            Request(
                request_id=leg.request_id,
                prompt_token_ids=leg.token_ids,
                sampling=leg.sampling,
                lifecycle=Lifecycle(received_s=self._parts.clock.now()),
                cache_salt=leg.cache_salt,
                leg_token_limit=1,
            ),
            leg.prefix_sources,
        )

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        """Refuse: this is the wrong pool."""
        refuse(leg, link, InvalidRequest("a prefill node takes no decode legs"))

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """Stop computing, take the announced blocks back."""
        self.legs.close(request_id)
        self._stop(request_id)
        self.handoffs.end(request_id, RequestCancelled(reason))

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        """Nobody is left to answer."""
        for request_id in self.legs.of(link):
            self.cancel_leg(request_id, "its coordinator is gone")

    # ---- what the engine reports ---------------------------------------------------------------

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """Announce what is there already, and ask for layers as they come."""
        return self.handoffs.begin_step(rows)

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """Announce them."""
        self.handoffs.layers_done(rows, num_layers)

    def step_done(self, report: StepReport) -> None:
        """Token 1 first, because TTFT waits for it; then what decode nodes wait for."""
        for row, token in zip(report.rows, report.sampled, strict=True):
            if token is not None and not row.request.is_cancelled:
                self.legs.add_tokens(_token_one(row.request, token))
        self.legs.flush()
        observe_step(self._parts.metrics, report)
        self._prefixes.observe_step(report)
        for row, token in zip(report.rows, report.sampled, strict=True):
            if not row.request.is_cancelled:
                self._advance_handoff(row.request, token)

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """A step raised."""
        for request in requests:
            self.handoffs.end(request.request_id, error)
            self.legs.fail(request.request_id, error)

    async def close(self) -> None:
        """Fetch no more prefixes, and hang up on those they came from."""
        await self._prefixes.close()
        await self.sessions.close()

    def _stop(self, request_id: str) -> None:
        self._prefixes.cancel(request_id)
        self.engine.cancel(request_id)

    def _watch(self) -> None:
        """What back-pressure does here."""
        metrics, handoffs, held_back = (
            self._parts.metrics,
            self.handoffs,
            self.engine.queues.held_back,
        )
        block_bytes = self._parts.identity.layout.block_bytes
        metrics.watch("handoffs", "Handoffs not settled yet", lambda: len(handoffs))
        metrics.watch(
            "pinned_bytes",
            "KV held for others to pull",
            lambda: handoffs.num_pinned_blocks * block_bytes,
        )
        metrics.watch(
            "throttled", "1: prompts wait for KV here to be pulled", lambda: held_back.is_running
        )
        metrics.count(
            "throttled_seconds",
            "Time during which prompts waited for KV here to be pulled",
            lambda: held_back.seconds,
        )

    def _settled(self, request_id: str) -> None:
        self.legs.close(request_id)
        self._stop(request_id)  # given up before the prefill was over

    def _expired(self, request_id: str, error: PdserveError) -> None:
        self._stop(request_id)
        self.legs.fail(request_id, error)

    def _advance_handoff(self, request: Request, token: SampledToken | None) -> None:
        if token is None:
            self.handoffs.announce(request)
            return
        if request.finish_reason is None and request.request_id in self.handoffs:
            self.handoffs.publish(request, _handoff_record(request, token))
            return  # the leg stays open until the handoff is settled
        self.handoffs.end(request.request_id, RequestEnded("token 1 was the last one"))
        self.legs.close(request.request_id)


def _token_one(request: Request, token: SampledToken) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id,
        index=0,
        token_ids=[token.token_id],
        logprobs=[token.logprobs] if token.logprobs else [],
        finish_reason=request.finish_reason,
        stop_token_id=request.stop_token_id,
        cached_tokens=request.num_cached_tokens,
        times=request.lifecycle.phase_times(),
    )


def _handoff_record(request: Request, token: SampledToken) -> HandoffRecord:
    prefill_end_s = request.lifecycle.first_token_s
    assert prefill_end_s is not None, "token 1 has been sampled"
    return HandoffRecord(
        request_id=request.request_id,
        num_tokens=request.num_prompt_tokens,
        token_ids=list(request.output_token_ids),
        logprobs=[token.logprobs] if token.logprobs else [],
        cached_tokens=request.num_cached_tokens,
        prefill_end_s=prefill_end_s,
    )
