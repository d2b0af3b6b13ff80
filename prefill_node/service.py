"""The life of a request on a prefill node:

1. `start`: the leg arrives, is queued in the engine, and its handoff is opened. It is admitted when
   the other prompts and the KV that waits to be pulled leave room for it (`prefill_node.policies`).
2. `step_done`, once per chunk: complete blocks are announced to the subscribers. For a large chunk,
   layers are announced as they are completed (`layers_done`).
3. The last chunk: token 1 goes to the coordinator at once (`add_tokens`); then the handoff record
   is published (`step_done`). The engine drops the request; the handoff still holds its blocks.
4. The decode node pulls and settles (`handoffs.settle`): the blocks are freed.

A stream that decodes here, and that another node takes over, ends here in the same way: its last
token here is to it what token 1 is to a prefill (`handoffs.take_over`).

A cancel, a failed step or a lost coordinator ends a request at any of these points. A node accepts
prefill legs whatever its role (`pdserve.node.services`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.node.legs import request_of, token_event
from pdserve.node.roles import NodeParts, Sampled
from pdserve.protocol import HandoffRecord, HeadRow, PrefillLeg
from pdserve.shared.errors import PdserveError, RequestCancelled, RequestEnded
from prefill_node.handoffs import Handoffs
from prefill_node.policies import make_prefill_policy


class PrefillNode:
    """The service for prefill legs (`pdserve.node.roles.PrefillService`)."""

    num_waiting = 0  # all legs wait in the engine's queue

    def __init__(self, parts: NodeParts) -> None:
        config, handoff, pool = parts.config, parts.config.handoff, parts.pool
        num_kept_free = pool.num_blocks - int(pool.num_blocks * handoff.pinned_limit)
        self.announcer = self.handoffs = handoffs = Handoffs(
            parts.exporter,
            pool,
            on_settled=self._settled,
            on_failed=self._handoff_failed,
            lease_s=parts.config.timeouts.lease_s,
            announce_bytes=handoff.announce_bytes,
            find=parts.engine.find,
            on_leaving=parts.engine.wake,
        )
        self.policy = make_prefill_policy(
            config.policy,
            config.engine,
            parts.perf,
            parts.clock,
            num_kept_free,
            lambda: handoffs.num_pinned_blocks,
        )
        self._parts = parts
        self._watch()

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for decode nodes to pull."""
        return self.handoffs.num_pinned_blocks

    def leaving(self, request_id: str) -> Request | None:
        """As PrefillService.leaving."""
        return self.handoffs.leaving(request_id)

    # ---- what coordinators ask for -------------------------------------------------------------

    def start(self, leg: PrefillLeg) -> None:
        """Open the handoffs of a prefill leg, and queue its prompt."""
        if leg.handoff:
            for request_id in leg.request_ids:
                self.handoffs.open(request_id)
        request = request_of(leg, self._parts.clock.now())
        request.siblings = [
            Request(
                request_id=sibling.request_id,
                prompt=leg.prompt,
                sampling=replace(leg.sampling, seed=sibling.seed, prompt_logprobs=None),
                lifecycle=request.lifecycle,  # they share its prefill
                leg_token_limit=1,
            )
            for sibling in leg.siblings
        ]
        self._parts.preparation.submit(request, leg.prefix_sources)

    def cancel(self, request_id: str, reason: str) -> None:
        """End the request's handoff and release its announced blocks."""
        self.handoffs.end(request_id, RequestCancelled(reason))

    # ---- what the engine reports ---------------------------------------------------------------

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """Announce cached KV, and return after which layers of the step more is to be announced."""
        return self.handoffs.begin_step(rows)

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """Announce the layers that the running step has completed."""
        self.handoffs.layers_done(rows, num_layers)

    def add_tokens(self, sampled: Sequence[Sampled], started_s: float) -> None:
        """Send token 1 at once, since TTFT depends on it; or a stream's last token here."""
        for request, token in sampled:
            if token is not None or request.is_done:
                times = request.lifecycle.phase_times()
                event = token_event(request, token, times)
                if self._is_taken_over(request):
                    event = replace(event, is_taken_over=True)
                self._parts.legs.add_event(event)
                for sibling, first in _siblings(request, token):
                    # Without times: the prompt that they share is counted once.
                    self._parts.legs.add_event(token_event(sibling, first, None))

    def step_done(self, sampled: Sequence[Sampled]) -> None:
        """Announce each request's new blocks, or publish its handoff record."""
        for request, token in sampled:
            self._advance_handoff(request, token)
        self.handoffs.end_streams()

    def requests_failed(self, requests: Sequence[Request], error: PdserveError) -> None:
        """End the handoffs of the failed requests."""
        for request in requests:
            for answer in request.answers:
                self.handoffs.end(answer.request_id, error)

    def _watch(self) -> None:
        """Register the metrics of handoffs and back-pressure."""
        metrics, handoffs, held_back = (
            self._parts.metrics,
            self.handoffs,
            self._parts.engine.queues.held_back,
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
        self._parts.legs.close(request_id)
        self._parts.preparation.cancel(request_id)  # it may have been given up during the prefill

    def _handoff_failed(self, request_id: str, error: PdserveError) -> None:
        """Fail this answer's leg, and stop its prompt.

        The handoffs of its siblings end when the coordinator, told of the failure, cancels them.
        """
        self._parts.preparation.cancel(request_id)
        self._parts.legs.fail(request_id, error)

    def _is_taken_over(self, request: Request) -> bool:
        """Whether another node goes on with a stream whose last token here has been sampled."""
        is_stream = self.handoffs.taker_knows(request.request_id) is not None
        return is_stream and request.finish_reason is None

    def _advance_handoff(self, request: Request, token: SampledToken | None) -> None:
        if not request.is_done:
            self.handoffs.announce(request)
            return
        for answer, first in ((request, token), *_siblings(request, token)):
            if first and answer.finish_reason is None and answer.request_id in self.handoffs:
                # The leg stays open until the handoff is settled.
                tapped, position = request.tapped, request.num_computed_tokens - 1
                row = None if tapped is None else tapped.at(position)
                self.handoffs.publish(request, self._record(answer, first, row))
            else:
                self.handoffs.end(answer.request_id, RequestEnded("that token was the last one"))
                self._parts.legs.close(answer.request_id)

    def _record(self, request: Request, token: SampledToken, head: HeadRow | None) -> HandoffRecord:
        num_known = self.handoffs.taker_knows(request.request_id)
        if num_known is not None:
            return self._stream_record(request, num_known, head)
        prefill_end_s = request.lifecycle.first_token_s
        assert prefill_end_s is not None, "token 1 has been sampled"
        return HandoffRecord(
            request_id=request.request_id,
            num_tokens=request.num_prompt_tokens,
            token_ids=list(request.output_token_ids),
            logprobs=[token.logprobs] if token.logprobs else [],
            cached_tokens=request.num_cached_tokens,
            prefill_end_s=prefill_end_s,
            made_s=self._parts.clock.now(),
            adapter=request.prompt.adapter,
            head=head,
            num_by_prefill=request.num_prompt_tokens if self._parts.bound_to is not None else None,
        )

    def _stream_record(
        self, stream: Request, num_known: int, head: HeadRow | None
    ) -> HandoffRecord:
        """What its next node does not know of it; log-probabilities only if they are kept."""
        ended_s, output = stream.lifecycle.finished_s, stream.output_token_ids
        assert ended_s is not None, "it has ended here"
        kept = self._parts.legs.scores.of(stream.request_id)
        return HandoffRecord(
            request_id=stream.request_id,
            num_tokens=stream.num_computed_tokens,
            token_ids=output[num_known:],
            logprobs=kept.within(num_known, len(output)) if kept is not None else [],
            cached_tokens=stream.num_cached_tokens,
            prefill_end_s=ended_s,
            made_s=self._parts.clock.now(),
            adapter=stream.prompt.adapter,
            head=head,
            num_by_prefill=stream.num_by_prefill,
        )


def _siblings(
    request: Request, token: SampledToken | None
) -> Iterator[tuple[Request, SampledToken]]:
    """Yield each sibling with its token 1."""
    return zip(request.siblings, token.siblings if token else (), strict=True)
