"""The life of a request on a decode node:

1. `start`: the leg arrives. With a source, an intake task transfers the KV
   (`intake.take`); without one, the prompt goes to the engine, which prefills it in chunks.
2. The request is adopted by the engine and joins the batch at the next step.
3. `add_tokens`, once per token: tokens go to the coordinator, one message per step.
4. The last token carries the phase times; the engine frees the blocks.

The KV of a preempted request is fetched or computed again, and the request joins the batch as
before; so does a request that was interrupted on another node and comes with its output. One that
still runs there has a source, and is taken over when its KV is here. A cancel,
a failed pull or step, or a lost coordinator ends a request at any of these points; one that can be
claimed outlives its coordinator for a while (`pdserve.node.orphans`). A node accepts decode legs
whatever its role (`pdserve.node.services`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from decode_node.arrival import AnnouncedPulls
from decode_node.intake import Intake
from decode_node.policies import make_decode_policy
from decode_node.policies.interface import ChargesDrafts, SideBySide, StepPhase
from decode_node.room import RoomQueue
from kv_transfer.host import host_id
from pdserve.engine.request import Request, SampledToken
from pdserve.node.legs import request_of, token_event
from pdserve.node.roles import NodeParts, Sampled
from pdserve.protocol import DecodeLeg
from pdserve.shared.errors import (
    ConfigError,
    PdserveError,
    PeerLost,
    RequestCancelled,
    RequestEnded,
)

log = logging.getLogger(__name__)


class DecodeNode:
    """The service for decode legs (`pdserve.node.roles.Service`)."""

    def __init__(self, parts: NodeParts) -> None:
        config = parts.config
        self.policy = make_decode_policy(config.policy, config.engine, parts.perf, parts.clock)
        if isinstance(self.policy, ChargesDrafts):
            parts.speculation.charge = self.policy.charge
        self._parts = parts
        self._room = RoomQueue(parts.engine, self.policy)
        self._coming: dict[str, Request] = {}  # streams that are being taken over, by leg
        pulls = AnnouncedPulls(
            parts.puller, parts.pull_costs, parts.clock, config.timeouts, host_id()
        )
        self._intake = Intake(
            parts.engine,
            self._room,
            parts.preparation,
            parts.sessions,
            pulls,
            parts.metrics,
            parts.legs.scores,
            is_by_role=parts.bound_to is not None,
        )
        parts.metrics.watch(
            "room_waiting_requests",
            "Requests whose KV waits elsewhere for room here",
            lambda: self.num_waiting,
        )
        parts.metrics.count(
            "ticket_renewals",
            "Requests for which tickets had become old",
            lambda: pulls.num_renewals,
        )

    @property
    def phases(self) -> tuple[StepPhase, StepPhase]:
        """As DecodeService.phases."""
        if not isinstance(self.policy, SideBySide):
            raise ConfigError(
                f"decode_policy {self._parts.config.policy.decode_policy}: it cannot plan decodes "
                "and prompts apart (plan_decodes, plan_prompts), as multiplexed mode needs it"
            )
        return StepPhase(self.policy.plan_decodes), StepPhase(self.policy.plan_prompts)

    @property
    def num_waiting(self) -> int:
        """Requests whose KV waits on a prefill node for room here."""
        return len(self._room)

    def coming(self, request_id: str) -> Request | None:
        """As DecodeService.coming."""
        return self._coming.get(request_id)

    # ---- what coordinators ask for -------------------------------------------------------------

    def start(self, leg: DecodeLeg) -> None:
        """Start a decode leg, from a prefill node's KV or from the prompt."""
        if leg.source is None:
            request = request_of(leg, self._parts.clock.now(), leg.prefix_sources)
            if self._parts.bound_to is not None:
                request.num_by_prefill = 0  # what the prefix cache has is, and is found later
            self._parts.preparation.submit(request, leg.prefix_sources)
        else:
            request = self._intake.expected(leg, leg.source)
            if leg.takes_over:
                self._coming[request.request_id] = request
            intake = self._intake.take(request, leg.prompt_id, leg.source, leg.takes_over)
            self._parts.preparation.take_in(request, intake, self._intake_done)

    def cancel(self, request_id: str, reason: str) -> None:
        """Let the next waiting request check for room."""
        self._coming.pop(request_id, None)
        self._room.offer()  # without blocks it frees none, but it may have blocked others

    # ---- what the engine reports ---------------------------------------------------------------

    def add_tokens(self, sampled: Sequence[Sampled], started_s: float) -> None:
        """Send each stream's next tokens."""
        legs = self._parts.legs
        plain: list[tuple[str, int, int]] = []
        for request, token in sampled:
            if request.lifecycle.adopted_s is not None and request.lifecycle.joined_s is None:
                request.lifecycle.joined_s = started_s
            index = len(request.output_token_ids) - 1
            if request.num_by_prefill is not None and self._is_first(request, token):
                self._note_misfits(request)
                is_plain = False
            elif (
                token is not None and token.logprobs is None and not (token.after or token.refused)
            ):
                is_plain = index > 0 and request.finish_reason is None
            else:
                is_plain = False
            if token is not None and is_plain:
                plain.append((request.request_id, index, token.token_id))
            elif token is not None or request.is_done:  # a request may end with its prompt
                times = request.lifecycle.phase_times() if request.is_done else None
                legs.add_event(token_event(request, token, times))
                if request.is_done:
                    legs.close(request.request_id)
        legs.add_tokens(plain)

    def step_done(self, sampled: Sequence[Sampled]) -> None:
        """Check for room, since finished requests may have freed some."""
        self._room.offer()

    def requests_failed(self, requests: Sequence[Request], error: PdserveError) -> None:
        """Check for room for the requests that waited behind the failed ones."""
        self._room.offer()  # requests without blocks free none, but may have blocked others

    @staticmethod
    def _is_first(request: Request, token: SampledToken | None) -> bool:
        """Whether a request has got its first token of this node, or has ended with its prompt."""
        if token is None:
            return request.is_done
        num_new = 1 + len(token.after)
        return len(request.output_token_ids) - num_new == request.num_emitted_before

    def _note_misfits(self, request: Request) -> None:
        """Say that the prompt's KV, or some of it, is not as declared: no prefill node was left."""
        if num_misfits := request.num_prompt_misfits:
            self._parts.metrics.decode_precision_tokens.inc(num_misfits)
            log.warning(
                "%s: %d tokens of its prompt were computed with the weights of decode nodes, since "
                "no prefill node was there",
                request.request_id,
                num_misfits,
            )

    def _intake_done(self, request: Request, error: BaseException | None) -> None:
        self._coming.pop(request.request_id, None)
        if error is None:
            return
        legs, request_id = self._parts.legs, request.request_id
        if type(error) is RequestEnded:  # none of its subclasses: nothing is left to decode
            legs.close(request_id)  # the coordinator learns of the end with token 1
            return
        if isinstance(error, RequestCancelled):  # not here: then nobody would ask any more
            error = PeerLost(f"its prefill was given up: {error}")
        elif not isinstance(error, PdserveError):
            log.error("the intake of %s failed", request_id, exc_info=error)
            error = PdserveError(f"the intake failed: {type(error).__name__}: {error}")
        legs.fail(request_id, error)
