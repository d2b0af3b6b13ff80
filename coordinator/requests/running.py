"""The life of one request: it may wait in line first, then it runs on its nodes.

Token 1 comes from the prefill node and the others from the decode node, over two streams. Events
are ordered by output index, so callers see neither the race between the two streams nor repeated
tokens.

    start ──► waiting ──► dispatched ──► token 1 (prefill node) ──► tokens 2.. (decode node) ──► end
                 │            ├───────────────────┴──► failed | cancelled, both legs told
                 │            ├──► interrupted ──► dispatched again, to go on where it was
                 │            └──► taken over by another node, while it runs
                 └──► failed | cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex

import msgspec
from msgspec import structs

from coordinator.admission.slack import promise_left
from coordinator.generation import GenerationRequest, Listener, Route
from coordinator.nodes.registry import Member
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.journey import Journey
from coordinator.requests.showing import Showing
from coordinator.routing import Booking
from pdserve._native import TokenRun
from pdserve.protocol import CancelLeg, Slo, TokenEvent, TokenLogprobs
from pdserve.protocol.legs import leg_id
from pdserve.shared.errors import DeadlineExceeded, PdserveError, RequestCancelled


class Dispatch(msgspec.Struct, frozen=True):
    """The dispatch of a request to its nodes."""

    booking: Booking
    at_s: float
    slo: Slo  # the promise that its nodes have to keep

    @property
    def held_until_s(self) -> float:
        """The time until which token 1 may be held back."""
        return self.at_s + self.slo.hold_s

    @property
    def prefill(self) -> Member | None:
        """The node of the prefill leg; None if the decode node prefills."""
        return self.booking.placement.prefill

    @property
    def decode(self) -> Member | None:
        """The node of the decode leg; None if nothing has to be decoded."""
        return self.booking.placement.decode

    @property
    def computes_prompt(self) -> Member | None:
        """The node that computes the prompt for this request; None: it is computed already."""
        if self.booking.placement.shares_prefill:
            return None
        return self.prefill or self.decode

    @property
    def handed_off(self) -> tuple[Member, Member] | None:
        """The prefill node and the decode node, if both have a part of the request."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill, self.decode

    @property
    def members(self) -> list[Member]:
        """All nodes that have a leg of the request."""
        return [member for member in (self.prefill, self.decode) if member is not None]


@dataclass(frozen=True, slots=True)
class Successor:
    """The leg that is to take a stream over from the node where it still runs."""

    request: GenerationRequest
    hashes: PromptHashes
    dispatch: Dispatch
    timer: asyncio.TimerHandle  # after which it is not waited for any longer

    @property
    def target(self) -> Member:
        """The node that takes the stream over."""
        target = self.dispatch.decode
        assert target is not None
        return target


class RunningRequest:
    """A request in flight (`coordinator.generation.Generation`)."""

    def __init__(
        self,
        request: GenerationRequest,
        hashes: PromptHashes,
        started_s: float,
        deadline_s: float,
        on_end: Callable[[RunningRequest, bool], None],
    ) -> None:
        """Start the deadline timer.

        Args:
            deadline_s: seconds from now.
            on_end: called with True if the request finished, False if it failed or was cancelled.
        """
        self.request_id = request.request_id
        self._life = token_hex(4) if request.is_claimable else ""
        # As its nodes have it: with another id after an interruption.
        self.request = request
        if self._life:
            self.request = structs.replace(
                request, request_id=leg_id(request.request_id, 0, self._life)
            )
        self.hashes = hashes  # kept: a waiting request is placed repeatedly
        self.journey = Journey(
            request.request_id,
            request.slo.name,
            request.prompt.num_tokens,
            started_s - request.waited_s,
            started_s,
            span=request.span,
            tenant=request.slo.tenant,
        )
        self.dispatch: Dispatch | None = None  # None: waiting in the coordinator
        self.keeps_promise = False  # while it waits: as soon as there are nodes, they get it
        self._claimed_revision = ""  # of what it began with
        self.successor: Successor | None = None  # None: its stream is not being taken over
        self.shuns_takeovers = False  # one has failed
        self.siblings: Sequence[RunningRequest] = ()  # the other answers to the same prompt
        self.output = TokenRun()  # all tokens received without a gap
        self._on_tokens: Callable[[TokenRun], None] | None = None
        self._num_accepted = self._num_refused = 0  # guesses, in all events
        self._logprobs: list[TokenLogprobs] = []  # of these, if it is claimable
        self.num_interruptions = 0
        self._num_attempts = 0  # legs after the first one
        self.waits_to_resume = False  # by itself, whatever becomes of its siblings
        self._on_further: Callable[[], object] | None = None
        self._started_s = started_s
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._showing = Showing()
        self._early: dict[int, TokenEvent] = {}  # by output index: arrived out of order
        self._has_ended = False
        self._deadline = asyncio.get_running_loop().call_later(deadline_s, self._expire)

    @property
    def route(self) -> Route:
        """The nodes that the request runs on; both None while it waits in line."""
        prefill = self.dispatch.prefill if self.dispatch else None
        decode = self.dispatch.decode if self.dispatch else None
        node = decode or prefill
        return Route(
            prefill_node=prefill.node_id if prefill else None,
            decode_node=decode.node_id if decode else None,
            revision=node.hello.revision if node else self._claimed_revision,
        )

    @property
    def num_tokens(self) -> int:
        """Output tokens received without a gap."""
        return len(self.output)

    @property
    def on_further(self) -> Callable[[], object] | None:
        """Called once, with its next tokens."""
        return self._on_further

    @on_further.setter
    def on_further(self, on_further: Callable[[], object] | None) -> None:
        self._on_further = on_further
        self.output.close()

    @property
    def has_ended(self) -> bool:
        """Whether its listener has been told its end."""
        return self._has_ended

    @property
    def has_token_one(self) -> bool:
        """Whether the prefill is over; token 1 may not have been shown to the client yet."""
        return len(self.output) > 0

    @property
    def siblings_to_begin(self) -> list[RunningRequest]:
        """Siblings that have neither been dispatched nor ended, and wait for this answer."""
        return [
            sibling
            for sibling in self.siblings
            if sibling.dispatch is None and not (sibling._has_ended or sibling.waits_to_resume)
        ]

    @property
    def depending(self) -> list[RunningRequest]:
        """Dispatched siblings that wait for the prompt that is computed for this request."""
        if self.has_token_one:  # what becomes of it is nothing to them: they would not be begun
            return []
        return [
            sibling
            for sibling in self.siblings
            if sibling.dispatch is not None
            and sibling.dispatch.booking.placement.shares_prefill
            and not (sibling.has_token_one or sibling._has_ended)
        ]

    @property
    def within_s(self) -> float:
        """Seconds from its start in which its first token is promised; else all that it has."""
        return self.request.slo.ttft_s or self._deadline_s

    def waited_s(self, now_s: float) -> float:
        """Return the seconds since the request was started."""
        return now_s - self._started_s

    def slo_left(self, now_s: float) -> Slo:
        """Return what is left of the request's promise."""
        return promise_left(self.request, self._deadline_s, now_s - self._started_s)

    def listen(
        self, listener: Listener, on_tokens: Callable[[TokenRun], None] | None = None
    ) -> None:
        """See Generation."""
        self._on_tokens = on_tokens
        self._showing.listen(listener)

    def tell(self) -> None:
        """Tell the listener that the run has tokens again."""
        if self._on_tokens is not None:
            self._on_tokens(self.output)

    def cancel(self, reason: str) -> None:
        """Cancel both legs, or leave the line."""
        self.end(RequestCancelled(reason))

    def leave(self) -> None:
        """Know nothing of the request any more, and let its nodes go on."""
        if not self._has_ended:
            self._leave(by_itself=False)

    def hold(self, at_most_s: float, on_shown: Callable[[], None]) -> None:
        """Hold back token 1, which is delivered next. See Showing.hold."""
        self._showing.hold(at_most_s, on_shown)

    def deliver(self, event: TokenEvent, sender: Member) -> None:
        """Accept tokens from a node in any order, and pass them on in output order."""
        output = self.output
        if self._has_ended or self.dispatch is None or event.index < len(output):
            return
        self._early[event.index] = event
        while (ready := self._early.pop(len(output), None)) is not None:
            output.extend(ready.token_ids)
            if ready.logprobs or ready.accepted or ready.refused:
                self._keep(ready)
            self.dispatch.booking.progressed(len(output))
            if (on_further := self._on_further) is not None:
                self._on_further = None
                on_further()
            self._showing.show(ready)
            if ready.finish_reason is not None:
                self._finish(self.dispatch, sender)
                return
        if self._on_tokens and len(output) > 1 and not (self._early or self._on_further):
            output.open(self.dispatch.booking.steady_until_s)

    def interrupt(self, reason: str) -> None:
        """Take the request from its nodes; dispatched again, it goes on after its last token.

        It gets a new id: what its former nodes still say of it is said of a request that is gone.
        """
        dispatch, self.dispatch = self.dispatch, None
        assert dispatch is not None, "only what runs can be interrupted"
        self.output.close()
        self._tell_nodes(dispatch, reason)
        dispatch.booking.end(by_itself=False)
        self._early.clear()
        self.request, self.hashes = self.rest()
        self._num_attempts += 1
        self.num_interruptions += 1

    def succeed(self) -> Dispatch:
        """Go on as its successor, whose dispatch is returned; its former node has told its last.

        What the successor has said already is shown after that.
        """
        dispatch, successor = self.dispatch, self.successor
        assert dispatch is not None, "only what runs can be taken over"
        assert successor is not None, "nobody takes it over"
        self.output.close()
        dispatch.booking.end(by_itself=False)
        self.request, self.hashes = successor.request, successor.hashes
        self.dispatch, self.successor = successor.dispatch, None
        return successor.dispatch

    def begin_with(self, event: TokenEvent, revision: str, adapter: str, adapted_from: int) -> None:
        """Begin with what a node of `revision` has emitted for a lost coordinator, undispatched.

        It goes on with the `adapter` that it began with, which its name may stand for no longer.
        """
        if self._has_ended:
            return
        self._claimed_revision = revision
        prompt = structs.replace(self.request.prompt, adapter=adapter, adapted_from=adapted_from)
        self.request = structs.replace(self.request, prompt=prompt)
        self.output.extend(event.token_ids)
        self._keep(event)
        self._showing.show(event)
        if event.finish_reason is not None:
            self._leave(by_itself=True)
            return
        self.request, self.hashes = self.rest()
        self._num_attempts += 1
        self.num_interruptions += 1

    def rest(self) -> tuple[GenerationRequest, PromptHashes]:
        """Return what would be left of the request if it were interrupted now."""
        sampling = self.request.sampling
        if self.has_token_one:  # with which the prompt's scores came
            sampling = structs.replace(sampling, prompt_logprobs=None)
        request = structs.replace(
            self.request,
            request_id=leg_id(self.request_id, self._num_attempts + 1, self._life),
            sampling=sampling,
            output_token_ids=self.output.token_ids,
            output_logprobs=list(self._logprobs),
            num_accepted=self._num_accepted,
            num_refused=self._num_refused,
            was_interrupted=True,
        )
        is_reusable = sampling.reuses_prefix
        return request, PromptHashes(request.context, is_reusable=is_reusable)

    def begin_successor(self, dispatch: Dispatch, timer: asyncio.TimerHandle) -> Successor:
        """Have another leg take its stream over; the id of a leg is never used again."""
        request, hashes = self.rest()
        self._num_attempts += 1
        self.successor = Successor(request, hashes, dispatch, timer)
        return self.successor

    def end(self, error: PdserveError) -> None:
        """Fail or cancel the request: the client gets `error`, and both nodes a CancelLeg.

        Before token 1 its siblings end too, since they depend on its prefill.
        """
        if self._has_ended:
            return
        self._showing.show(error)
        self.journey.error = error.code
        if self.dispatch is not None:
            self._tell_nodes(self.dispatch, error.message)
        self._leave(by_itself=False)
        if not self.has_token_one:
            for sibling in self.siblings:
                sibling.end(error)

    def _keep(self, event: TokenEvent) -> None:
        """For the stream's next node, whom yet another coordinator may ask for all of it."""
        self._num_accepted += event.accepted
        self._num_refused += event.refused
        if self.request.is_claimable:
            self._logprobs += event.logprobs

    def _tell_nodes(self, dispatch: Dispatch, reason: str) -> None:
        for member in dispatch.members:
            member.send(CancelLeg(request_id=self.request.request_id, reason=reason))

    def _finish(self, dispatch: Dispatch, sender: Member) -> None:
        decode = dispatch.decode
        if decode is not None and decode is not sender:  # finished with token 1: no decode needed
            decode.send(CancelLeg(request_id=self.request.request_id, reason="finished"))
        self._leave(by_itself=True)

    def _leave(self, *, by_itself: bool) -> None:
        self._has_ended = True
        self.output.close()
        self._deadline.cancel()
        if self.dispatch is not None:
            self.dispatch.booking.end(by_itself=by_itself)
        self._on_end(self, by_itself)

    def _expire(self) -> None:
        self.end(DeadlineExceeded(f"the request was not complete within {self._deadline_s:.3g} s"))
