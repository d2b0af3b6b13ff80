"""The two services of a node over one engine, and the node's role.

The role is only a label (as in Arrow): it selects the engine's policy and tells coordinators which
legs to send. A node accepts legs of either kind at any time, so a change of roles loses nothing:
legs in progress are finished beside the new work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport
from pdserve.engine.prompts.order import num_uncached
from pdserve.engine.request import Request, Scheduled
from pdserve.lifecycle import Lifecycle
from pdserve.node.legs import Legs
from pdserve.node.orphans import Orphans
from pdserve.node.prefixes.offers import Fetched
from pdserve.node.role_policy import PrefillRolePolicy
from pdserve.node.roles import NodeParts, Sampled, ServiceFactories
from pdserve.node.sessions.client import Sessions
from pdserve.node.sessions.server import Announcer
from pdserve.protocol import (
    Claim,
    DecodeLeg,
    LegFailed,
    LoadAdapter,
    NodeRole,
    NodeState,
    Prefetch,
    Prefetched,
    PrefillLeg,
    SamplingParams,
    is_long,
)
from pdserve.shared.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NoNodeAvailable,
    OutOfBlocks,
    PdserveError,
    RequestCancelled,
    RoleRefused,
)
from pdserve.wire.outbox import Sender

log = logging.getLogger(__name__)


class Services:
    """Receives legs (`coordinator_link.LegReceiver`) and the engine's steps (`StepObserver`).

    `prefill_refusal` says why the node cannot be a prefill node; empty: it can. `on_role` is called
    when a coordinator has given it a role, also the one that it has, and `on_drain` when one asks
    it to drain, with the model that it is to go on with.
    """

    def __init__(
        self,
        parts: NodeParts,
        make: ServiceFactories,
        role: NodeRole,
        *,
        prefill_refusal: str = "",
        on_role: Callable[[], None] = lambda: None,
        on_drain: Callable[[str], None] = lambda become: None,
    ) -> None:
        self.role = role
        self.prefill_refusal = prefill_refusal
        self._parts = parts
        self._on_role = on_role
        self._on_drain = on_drain
        self._prefill = make.prefill(parts)
        self._decode = make.decode(parts)
        self._prefill_role = PrefillRolePolicy(
            self._prefill.policy,
            self._decode.policy,
            lambda: self._prefill.num_pinned_blocks,
            int(parts.pool.num_blocks * parts.config.handoff.pinned_limit),
        )
        keep_s = parts.config.timeouts.orphan_s
        self._orphans = Orphans(self._stream, parts.legs, self.cancel_leg, keep_s)
        self._step_listeners: list[Callable[[StepReport], None]] = []
        self._follow_policy()

    @property
    def engine(self) -> Engine:
        """The engine that both services share."""
        return self._parts.engine

    @property
    def legs(self) -> Legs:
        """The legs in progress, of both kinds."""
        return self._parts.legs

    @property
    def sessions(self) -> Sessions:
        """The sessions over which KV is pulled."""
        return self._parts.sessions

    @property
    def announcer(self) -> Announcer:
        """What sessions of other nodes subscribe to."""
        return self._prefill.announcer

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for others to pull."""
        return self._prefill.num_pinned_blocks

    @property
    def num_adapters(self) -> int:
        """Adapters that are loaded."""
        return len(self._parts.adapters)

    @property
    def num_claimed(self) -> int:
        """Streams of lost coordinators that went on at another one."""
        return self._orphans.num_claimed

    @property
    def num_waiting(self) -> int:
        """Legs that wait for room."""
        parts = self._parts
        queued = len(parts.preparation) + len(parts.engine.queues.waiting)
        return queued + self._prefill.num_waiting + self._decode.num_waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute, also of prompts that are not in the engine's queues yet."""
        parts = self._parts
        num_outside = sum(num_uncached(prompt, parts.pool) for prompt in parts.preparation.prompts)
        return parts.engine.queues.queued_tokens + num_outside

    def on_step(self, listener: Callable[[StepReport], None]) -> None:
        """Call `listener` after each step, once its messages have been sent."""
        self._step_listeners.append(listener)

    # ---- LegReceiver ---------------------------------------------------------------------------

    def start_prefill(self, leg: PrefillLeg, link: Sender) -> None:
        """As LegReceiver.start_prefill, in either role."""
        if self._opens(leg, link):
            self._prefill.start(leg)

    def start_decode(self, leg: DecodeLeg, link: Sender) -> None:
        """As LegReceiver.start_decode, in either role."""
        if self._opens(leg, link):
            self._decode.start(leg)

    def prefetch(self, message: Prefetch, link: Sender) -> None:
        """As LegReceiver.prefetch."""

        def over(request: Request, outcome: Fetched | BaseException) -> None:
            fetched = outcome if isinstance(outcome, Fetched) else Fetched()
            num_tokens = fetched.from_nodes + fetched.from_tier + fetched.from_store
            link.send(Prefetched(request_id=request.request_id, num_tokens=num_tokens))

        request = Request(
            request_id=message.request_id,
            prompt=message.prompt,
            sampling=SamplingParams(),
            lifecycle=Lifecycle(received_s=self._parts.clock.now()),
        )
        self._parts.preparation.prefetch(request, message.prefix_sources, over)

    def claim(self, message: Claim, link: Sender) -> None:
        """As LegReceiver.claim; also if the node does not know yet that its coordinator is lost."""
        error = RequestCancelled("the request was made again, under the same key, elsewhere")
        for leg_id in self.legs.of_request(message.request_id):
            former = self.legs.link_of(leg_id)
            if former is self._orphans:
                continue
            if self._orphans.take_in(leg_id):
                former.send(LegFailed(request_id=leg_id, code=error.code, message=error.message))
            else:
                self.legs.fail(leg_id, error)
                self.cancel_leg(leg_id, error.message)
        self._orphans.claim(message, link)

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """As LegReceiver.cancel_leg; its blocks are freed once the running step has ended."""
        self.legs.close(request_id)
        self._parts.preparation.cancel(request_id)
        self._prefill.cancel(request_id, reason)
        self._decode.cancel(request_id, reason)

    def coordinator_lost(self, link: Sender) -> None:
        """As LegReceiver.coordinator_lost."""
        for request_id in self.legs.of(link):
            if not self._orphans.take_in(request_id):
                self.cancel_leg(request_id, "its coordinator is gone")
        self._parts.adapters.coordinator_lost(link)

    def load_adapter(self, order: LoadAdapter, link: Sender) -> None:
        """As LegReceiver.load_adapter."""
        self._parts.adapters.load(order, link)

    def unload_adapter(self, digest: str, link: Sender) -> None:
        """As LegReceiver.unload_adapter."""
        self._parts.adapters.unload(digest, link)

    def drain(self, become: str) -> None:
        """As LegReceiver.drain."""
        follows = f", and to become one of {become}" if become else ""
        log.info("%s was asked to drain%s", self._parts.node_id, follows)
        self._on_drain(become)

    def set_role(self, role: NodeRole) -> None:
        """As LegReceiver.set_role; a node that cannot change logs why."""
        node_id = self._parts.node_id
        if role is NodeRole.PREFILL and self.prefill_refusal:
            log.warning("%s stays a decode node: %s", node_id, self.prefill_refusal)
            return
        if self._parts.bound_to not in (None, role):
            log.warning("%s stays what it is: it has no weights of the other pool", node_id)
            return
        if role is not self.role:
            log.info(
                "%s is a %s node from now on; %d legs are under way",
                node_id,
                role.name.lower(),
                len(self.legs),
            )
            self.role = role
            self._follow_policy()
            self.engine.wake()  # the new policy may admit requests that the old one kept out
        self._on_role()

    # ---- StepObserver --------------------------------------------------------------------------

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """As StepObserver.step_planned; only prefills are announced while a step runs."""
        return self._prefill.step_planned(rows)

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """As StepObserver.layers_done."""
        self._prefill.layers_done(rows, num_layers)

    def step_done(self, report: StepReport) -> None:
        """Send tokens first, since clients wait for them; then what other nodes wait for."""
        prefills: list[Sampled] = []
        decodes: list[Sampled] = []
        for row, token in zip(report.rows, report.sampled, strict=True):
            request = row.request
            if not request.is_cancelled:
                # A stream may have been told to end after a step that is reported only now.
                limit = request.leg_token_limit  # `is_prefill_leg` and `is_done`, inlined
                ends = limit is not None and (limit == 1 or len(request.output_token_ids) >= limit)
                (prefills if ends else decodes).append((request, token))
        self._prefill.add_tokens(prefills, report.started_s)
        self._decode.add_tokens(decodes, report.started_s)
        self.legs.flush()
        self._prefill.step_done(prefills)
        self._decode.step_done(decodes)
        for listener in self._step_listeners:
            listener(report)

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """As StepObserver.requests_failed."""
        prefills = [request for request in requests if request.is_prefill_leg]
        decodes = [request for request in requests if not request.is_prefill_leg]
        self._prefill.requests_failed(prefills, error)
        self._decode.requests_failed(decodes, error)
        for request in requests:
            self._parts.preparation.cancel(request.request_id)  # if it was preempted
            for answer in request.answers:
                self.legs.fail(answer.request_id, error)

    def recall(self, request: Request) -> None:
        """As StepObserver.recall. A prompt's KV that this node cannot make comes from elsewhere."""
        if not request.is_of_two_weights:
            self._parts.preparation.recall(request)
            return
        error = OutOfBlocks("it was preempted, and its prompt is for the weights of prefill nodes")
        self.legs.fail(request.request_id, error)
        self.cancel_leg(request.request_id, error.message)

    async def close(self) -> None:
        """Give up all that is not in the engine yet, and close the sessions."""
        await self._parts.adapters.close()
        await self._parts.preparation.close()
        await self.sessions.close()

    def _opens(self, leg: PrefillLeg | DecodeLeg, link: Sender) -> bool:
        """Add a new leg to the legs in progress; False if it cannot be run, and was refused."""
        try:
            _check_leg(self._parts, leg)
        except PdserveError as error:
            link.send(LegFailed(request_id=leg.request_id, code=error.code, message=error.message))
            return False
        is_claimable = isinstance(leg, DecodeLeg) and leg.is_claimable
        for request_id in leg.request_ids:
            self.legs.open(
                request_id,
                link,
                is_claimable=is_claimable,
                traceparent=leg.traceparent,
                adapter=leg.prompt.adapter,
            )
        if isinstance(leg, DecodeLeg) and is_claimable and leg.sampling.logprobs is not None:
            num_emitted = len(leg.output_token_ids)
            self.legs.scores.open(leg.request_id, leg.output_logprobs, num_emitted)
        return True

    def _stream(self, leg_id: str) -> Request | None:
        engine, prefill, decode = self.engine, self._prefill, self._decode
        return engine.find(leg_id) or prefill.leaving(leg_id) or decode.coming(leg_id)

    def _follow_policy(self) -> None:
        beside = self._parts.prompt_engine
        if beside is not None:
            self.engine.policy, beside.policy = self._decode.phases
            return
        is_prefill = self.role is NodeRole.PREFILL
        self.engine.policy = self._prefill_role if is_prefill else self._decode.policy


def _check_leg(parts: NodeParts, leg: PrefillLeg | DecodeLeg) -> None:
    """Check that a leg that has just arrived can be started.

    Raises:
        NoNodeAvailable: the node is still loading its model.
        AdapterNotLoaded: it has not loaded the request's adapter.
        RoleRefused: such legs are for the weights of other nodes.
        ContextLengthExceeded: the request could outgrow the pool.
        InvalidRequest: its id is in use, or it makes no sense for this model.
        MalformedMessage: its log-probabilities make no sense.
    """
    num_tokens, max_model_len = leg.prompt.num_tokens, parts.max_model_len
    job = NodeRole.PREFILL if isinstance(leg, PrefillLeg) else NodeRole.DECODE
    if parts.bound_to not in (None, job):
        raise RoleRefused(f"a {job.name.lower()} leg is for nodes with the weights of that pool")
    if parts.state() is NodeState.LOADING:
        raise NoNodeAvailable("a node is still loading its model: try again shortly")
    known = next((request_id for request_id in leg.request_ids if request_id in parts.legs), None)
    if known is not None:
        raise InvalidRequest(f"the request id {known} is in use: it is running already")
    if not 0 < num_tokens <= max_model_len:
        raise ContextLengthExceeded(
            f"a prompt of {num_tokens} tokens: max_model_len {max_model_len} allows "
            f"1 to {max_model_len}"
        )
    if num_tokens + leg.sampling.max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"{num_tokens} prompt tokens and max_tokens {leg.sampling.max_tokens} are more than "
            f"max_model_len {max_model_len}"
        )
    if leg.prompt.is_long != is_long(num_tokens + leg.sampling.max_tokens, parts.short_len):
        raise InvalidRequest(
            f"{num_tokens} prompt tokens and max_tokens {leg.sampling.max_tokens} came as a "
            f"{'long' if leg.prompt.is_long else 'short'} request, but the longest short one has "
            f"{parts.short_len or 'any'} tokens here: upgrade the older of coordinator and node"
        )
    if isinstance(leg, PrefillLeg) and leg.siblings and leg.sampling.max_tokens == 0:
        raise InvalidRequest("a request without output cannot have several answers")
    token_ids = leg.prompt.token_ids
    if isinstance(leg, DecodeLeg) and leg.output_logprobs is not None:
        leg.output_logprobs.check()
    if isinstance(leg, DecodeLeg) and leg.output_token_ids:
        token_ids = token_ids + leg.output_token_ids
        if len(leg.output_token_ids) >= leg.sampling.max_tokens:
            raise InvalidRequest("a request that goes on has tokens left to emit")
    elif isinstance(leg, DecodeLeg) and leg.takes_over:
        raise InvalidRequest("a stream that is taken over has output")
    if not 0 <= min(token_ids) <= max(token_ids) < parts.vocab_size:
        raise InvalidRequest(f"token ids must be in 0..{parts.vocab_size - 1}")
    if leg.prompt.adapter:
        parts.adapters.use(leg.prompt.adapter)
