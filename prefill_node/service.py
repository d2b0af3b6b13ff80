"""A prefill node's life of a request:

1. `start_prefill`: the leg arrives, is queued in the engine, its handoff is opened.
2. `step_done`, once per chunk: blocks that are complete are announced to whoever has subscribed.
3. `step_done`, last chunk: token 1 goes to the coordinator at once; then the handoff record is
   published. The engine lets go of the request; the handoff still holds its blocks.
4. The decode node pulls and settles (`handoff.settle`): the blocks are free.

A cancel, a failed step or a lost coordinator ends it at any of these points.
"""

from __future__ import annotations

from pdserve.engine.engine import Engine, StepReport
from pdserve.engine.request import Request, SampledToken
from pdserve.errors import InvalidRequest, PdserveError, RequestCancelled, RequestEnded
from pdserve.lifecycle import Lifecycle
from pdserve.node.gauges import observe_step
from pdserve.node.legs import Legs
from pdserve.node.link import CoordinatorLink
from pdserve.node.roles import NodeParts, accepts, refuse
from pdserve.protocol import DecodeLeg, HandoffRecord, PrefillLeg, TokenEvent
from prefill_node.handoff import Handoffs
from prefill_node.scheduler import FcfsBudget


class PrefillNode:
    """The role of a prefill node (`pdserve.node.roles.Role`)."""

    def __init__(self, parts: NodeParts) -> None:
        config = parts.config.engine
        policy = FcfsBudget(config.token_budget, config.max_batch_size)
        self.engine = Engine(parts.pool, policy, parts.clock, parts.eos_token_ids)
        self.legs = Legs()
        self.announcer = self.handoffs = Handoffs(
            parts.exporter,
            parts.pool.block_size,
            retain=parts.pool.retain,
            release=parts.pool.release,
            on_settled=self._settled,
            on_expired=self._expired,
            lease_s=parts.config.timeouts.lease_s,
        )
        self._parts = parts

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for decode nodes to pull."""
        return self.handoffs.num_pinned_blocks

    @property
    def num_waiting(self) -> int:
        """Prompts not begun yet."""
        return len(self.engine.queues.waiting)

    # ---- what coordinators ask for -------------------------------------------------------------

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        """Queue the prompt."""
        if not accepts(self._parts, self.legs, leg, link):
            return
        self.legs.open(leg.request_id, link)
        if leg.handoff:
            self.handoffs.open(leg.request_id)
        self.engine.submit(
            Request(
                request_id=leg.request_id,
                prompt_token_ids=leg.token_ids,
                sampling=leg.sampling,
                lifecycle=Lifecycle(received_s=self._parts.clock.now()),
                cache_salt=leg.cache_salt,
                leg_token_limit=1,
            )
        )

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        """Refuse: this is the wrong pool."""
        refuse(leg, link, InvalidRequest("a prefill node takes no decode legs"))

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """Stop computing, take the announced blocks back."""
        self.legs.close(request_id)
        self.engine.cancel(request_id)
        self.handoffs.end(request_id, RequestCancelled(reason))

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        """Nobody is left to answer."""
        for request_id in self.legs.of(link):
            self.cancel_leg(request_id, "its coordinator is gone")

    # ---- what the engine reports ---------------------------------------------------------------

    def step_done(self, report: StepReport) -> None:
        """Token 1 first, because TTFT waits for it; then what decode nodes wait for."""
        for row, token in zip(report.rows, report.sampled, strict=True):
            if token is not None and not row.request.is_cancelled:
                self.legs.add_tokens(_token_one(row.request, token))
        self.legs.flush()
        observe_step(self._parts.metrics, report)
        for row, token in zip(report.rows, report.sampled, strict=True):
            if not row.request.is_cancelled:
                self._advance_handoff(row.request, token)

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """A step raised."""
        for request in requests:
            self.handoffs.end(request.request_id, error)
            self.legs.fail(request.request_id, error)

    async def close(self) -> None:
        """Nothing of its own is left running."""

    def _settled(self, request_id: str) -> None:
        self.legs.close(request_id)
        self.engine.cancel(request_id)  # given up before the prefill was over

    def _expired(self, request_id: str, error: PdserveError) -> None:
        self.engine.cancel(request_id)
        self.legs.fail(request_id, error)

    def _advance_handoff(self, request: Request, token: SampledToken | None) -> None:
        if token is None:
            self.handoffs.announce(request)
            return
        if request.finish_reason is None and request.request_id in self.handoffs:
            self.handoffs.announce(request)
            self.handoffs.publish(_handoff_record(request, token, self._parts.clock.now()))
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


def _handoff_record(request: Request, token: SampledToken, now_s: float) -> HandoffRecord:
    return HandoffRecord(
        request_id=request.request_id,
        num_tokens=request.num_prompt_tokens,
        token_ids=list(request.output_token_ids),
        logprobs=[token.logprobs] if token.logprobs else [],
        cached_tokens=request.num_cached_tokens,
        prefill_end_s=now_s,
    )
