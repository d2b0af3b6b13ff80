"""A decode node's life of a request:

1. `start_decode`: the leg arrives. With a source, an intake task brings the KV over
   (`intake.take`); without one, the prompt goes to the engine, which prefills it in chunks.
2. The request is adopted by the engine and joins the batch at the next step.
3. `step_done`, once per token: tokens go to the coordinator, one message per step.
4. The last token carries the phase times; the engine frees the blocks.

A cancel, a failed pull or step, or a lost coordinator ends it at any of these points.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from decode_node.intake import Intake
from decode_node.scheduler import DecodeFirst
from kv_transfer.host import host_id
from pdserve.engine.engine import Engine, StepReport
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.errors import InvalidRequest, PdserveError, RequestEnded
from pdserve.lifecycle import Lifecycle
from pdserve.node.gauges import observe_step
from pdserve.node.legs import Legs
from pdserve.node.link import CoordinatorLink
from pdserve.node.prefix_queue import make_prefix_queue
from pdserve.node.roles import NodeParts, accepts, refuse
from pdserve.node.session_client import Sessions
from pdserve.protocol import DecodeLeg, PrefillLeg, TokenEvent

log = logging.getLogger(__name__)


class DecodeNode:
    """The role of a decode node (`pdserve.node.roles.Role`)."""

    announcer = None
    num_pinned_blocks = 0

    def __init__(self, parts: NodeParts) -> None:
        config, timeouts = parts.config.engine, parts.config.timeouts
        policy = DecodeFirst(config.token_budget, config.max_batch_size)
        self.engine = Engine(parts.pool, policy, parts.clock, parts.eos_token_ids)
        self.legs = Legs()
        self._parts = parts
        self.sessions = Sessions(
            parts.node_id, parts.incarnation, parts.identity, parts.puller, parts.clock, timeouts
        )
        self._intake = intake = Intake(
            self.engine,
            self.sessions,
            parts.puller,
            parts.clock,
            timeouts,
            host_id(),
            parts.metrics,
        )
        parts.metrics.watch(
            "room_waiting_requests",
            "Requests whose KV waits elsewhere for room here",
            lambda: intake.num_waiting,
        )
        parts.metrics.count(
            "ticket_renewals",
            "Requests for which tickets had become old",
            lambda: intake.num_renewals,
        )
        self._prefixes = make_prefix_queue(parts, self.engine, self.sessions)
        self._intakes: dict[str, asyncio.Task[None]] = {}  # request_id |-> its intake

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks here yet."""
        return self._intake.num_waiting + len(self._prefixes) + len(self.engine.queues.waiting)

    # ---- what coordinators ask for -------------------------------------------------------------

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        """Take the request in, from a prefill node or from the prompt."""
        if not accepts(self._parts, self.legs, leg, link):
            return
        self.legs.open(leg.request_id, link)
        if leg.source is None:
            self._prefixes.submit(
                Request(
                    request_id=leg.request_id,
                    prompt_token_ids=leg.token_ids,
                    sampling=leg.sampling,
                    lifecycle=Lifecycle(received_s=self._parts.clock.now()),
                    cache_salt=leg.cache_salt,
                ),
                leg.prefix_sources,
            )
        else:
            task = asyncio.create_task(self._intake.take(leg, leg.source))
            self._intakes[leg.request_id] = task
            task.add_done_callback(partial(self._intake_done, leg.request_id))

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        """Refuse: this is the wrong pool."""
        refuse(leg, link, InvalidRequest("a decode node takes no prefill legs"))

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """Stop pulling or decoding; the blocks are free as soon as nothing writes to them."""
        self.legs.close(request_id)
        intake = self._intakes.get(request_id)
        if intake is not None:
            intake.cancel(reason)
        self._prefixes.cancel(request_id)
        if self.engine.cancel(request_id):
            self._intake.offer_room()  # one that had no blocks frees none, but stood in the way

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        """Nobody is left to answer."""
        for request_id in self.legs.of(link):
            self.cancel_leg(request_id, "its coordinator is gone")

    # ---- what the engine reports ---------------------------------------------------------------

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """Nobody pulls from here while a step runs."""
        return ()

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """Not asked for."""

    def step_done(self, report: StepReport) -> None:
        """Send the step's tokens."""
        for row, token in zip(report.rows, report.sampled, strict=True):
            request = row.request
            if request.lifecycle.adopted_s is not None and request.lifecycle.joined_s is None:
                request.lifecycle.joined_s = report.started_s
            if token is not None and not request.is_cancelled:
                self.legs.add_tokens(_token_event(request, token))
                if request.is_done:
                    self.legs.close(request.request_id)
        self.legs.flush()
        observe_step(self._parts.metrics, report)
        self._prefixes.observe_step(report)
        self._intake.offer_room()

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """A step raised."""
        for request in requests:
            self.legs.fail(request.request_id, error)

    async def close(self) -> None:
        """Give up every intake and hang up on the exporters."""
        intakes = list(self._intakes.values())
        for task in intakes:
            task.cancel()
        await asyncio.gather(*intakes, return_exceptions=True)
        await self._prefixes.close()
        await self.sessions.close()

    def _intake_done(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._intakes.get(request_id) is task:  # the id may have come again meanwhile
            del self._intakes[request_id]
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if type(error) is RequestEnded:  # none of its subclasses: there is nothing left to decode
            self.legs.close(request_id)  # the coordinator hears the end with token 1, or has heard
            return
        if not isinstance(error, PdserveError):
            log.error("the intake of %s failed", request_id, exc_info=error)
            error = PdserveError(f"the intake failed: {type(error).__name__}: {error}")
        self.legs.fail(request_id, error)


def _token_event(request: Request, token: SampledToken) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id,
        index=len(request.output_token_ids) - 1,
        token_ids=[token.token_id],
        logprobs=[token.logprobs] if token.logprobs else [],
        finish_reason=request.finish_reason,
        stop_token_id=request.stop_token_id,
        cached_tokens=request.num_cached_tokens,
        times=request.lifecycle.phase_times() if request.is_done else None,
    )
