"""One request from its start to its end: first it may wait, then it is on the nodes.

Token 1 comes from the prefill node, the rest from the decode node, over two streams; events are put
in order by their output index, so neither the race between the two nor a repeated token is visible
behind this file.

    start ──► waiting ──► dispatched ──► token 1 (prefill node) ──► tokens 2.. (decode node) ──► end
                 └────────────┴───────────────────┴──► failed | cancelled, both legs told
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from coordinator.generation import GenerationRequest, Listener, Route
from coordinator.prompt_hashes import PromptHashes
from coordinator.registry import Member
from coordinator.routing import Booking
from pdserve.errors import DeadlineExceeded, PdserveError, RequestCancelled
from pdserve.protocol import CancelLeg, Slo, TokenEvent


@dataclass(frozen=True, slots=True)
class Dispatch:
    """That a request is on its nodes."""

    booking: Booking
    at_s: float
    slo: Slo  # what its nodes are to keep

    @property
    def held_until_s(self) -> float:
        """Token 1 may be held back until then."""
        return self.at_s + self.slo.hold_s

    @property
    def prefill(self) -> Member | None:
        """Who prefills; None: the decode node."""
        return self.booking.placement.prefill

    @property
    def decode(self) -> Member | None:
        """Who decodes; None: nobody has to."""
        return self.booking.placement.decode

    @property
    def members(self) -> list[Member]:
        """Who has a leg of it."""
        return [member for member in (self.prefill, self.decode) if member is not None]


@dataclass(slots=True)
class _Held:
    """That token 1 is held back."""

    timer: asyncio.TimerHandle
    on_shown: Callable[[], None]
    token_one: TokenEvent | None = None  # None: it is not here yet


class RunningRequest:
    """A request in flight (`coordinator.generation.Generation`)."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt: PromptHashes,
        started_s: float,
        deadline_s: float,
        on_end: Callable[[RunningRequest, bool], None],
    ) -> None:
        """`deadline_s` runs from now on; `on_end` hears whether it ended by itself."""
        self.request = request
        self.prompt = prompt  # while it waits, it is placed again and again
        self.dispatch: Dispatch | None = None  # None: it waits in the coordinator
        self.siblings: Sequence[RunningRequest] = ()  # other answers; its prompt is theirs
        self.num_tokens = 0  # of output, so far without a gap
        self.num_attempts = 0  # times that it was dispatched
        self._started_s = started_s
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._unheard: list[TokenEvent | Exception] = []  # before there was a listener
        self._listener: Listener = self._unheard.append
        self._tell: Listener = self._listener  # or what holds token 1 back
        self._held: _Held | None = None
        self._early: dict[int, TokenEvent] = {}  # by index: arrived before their turn
        self._has_ended = False
        self._deadline = asyncio.get_running_loop().call_later(deadline_s, self._expire)

    @property
    def route(self) -> Route:
        """Nowhere while it waits."""
        prefill = self.dispatch.prefill if self.dispatch else None
        decode = self.dispatch.decode if self.dispatch else None
        return Route(
            prefill_node=prefill.node_id if prefill else None,
            decode_node=decode.node_id if decode else None,
        )

    @property
    def has_token_one(self) -> bool:
        """Whether the prefill is over; the client may not have been shown token 1 yet."""
        return self.num_tokens > 0

    @property
    def siblings_to_begin(self) -> list[RunningRequest]:
        """Those that are on no node yet, and are still wanted."""
        return [s for s in self.siblings if s.dispatch is None and not s._has_ended]

    def waited_s(self, now_s: float) -> float:
        """Since it was started."""
        return now_s - self._started_s

    def slo_left(self, now_s: float) -> Slo:
        """What is left of what it was promised."""
        return slo_left(self.request, self._deadline_s, now_s - self._started_s)

    def listen(self, listener: Listener) -> None:
        """As Generation.listen."""
        self._listener = listener
        if self._held is None:
            self._tell = listener
        for event in self._unheard:
            listener(event)
        self._unheard.clear()

    def cancel(self, reason: str) -> None:
        """Stop both legs, or leave the line."""
        self.end(RequestCancelled(reason))

    def hold(self, at_most_s: float, on_shown: Callable[[], None]) -> None:
        """Keep token 1, which is delivered next, until something follows it.

        `on_shown` is called when it is told.
        """
        timer = asyncio.get_running_loop().call_later(at_most_s, self._show)
        self._held = _Held(timer, on_shown)
        self._tell = self._keep

    def deliver(self, event: TokenEvent, sender: Member) -> None:
        """Take tokens from a node, in whatever order they come."""
        if self._has_ended or self.dispatch is None or event.index < self.num_tokens:
            return
        self._early[event.index] = event
        while (ready := self._early.pop(self.num_tokens, None)) is not None:
            self.num_tokens += len(ready.token_ids)
            self.dispatch.booking.progressed(self.num_tokens)
            self._tell(ready)
            if ready.finish_reason is not None:
                self._finish(self.dispatch, sender)
                return

    def end(self, error: PdserveError) -> None:
        """Fail or cancel: the client gets `error`, both nodes a cancel.

        Without token 1 there is nothing for its siblings either.
        """
        if self._has_ended:
            return
        self._tell(error)
        for member in self.dispatch.members if self.dispatch else []:
            member.send(CancelLeg(request_id=self.request.request_id, reason=error.message))
        self._leave(by_itself=False)
        if not self.has_token_one:
            for sibling in self.siblings:
                sibling.end(error)

    def _keep(self, event: TokenEvent | Exception) -> None:
        assert self._held is not None
        if self._held.token_one is None and isinstance(event, TokenEvent):
            self._held.token_one = event
        else:
            self._show()
            self._tell(event)

    def _show(self) -> None:
        """Tell token 1 at last."""
        assert self._held is not None
        held, self._held = self._held, None
        held.timer.cancel()
        self._tell = self._listener
        if held.token_one is not None:
            held.on_shown()
            self._tell(held.token_one)

    def _finish(self, dispatch: Dispatch, sender: Member) -> None:
        decode = dispatch.decode
        if decode is not None and decode is not sender:  # ended with token 1: nothing to decode
            decode.send(CancelLeg(request_id=self.request.request_id, reason="finished"))
        self._leave(by_itself=True)

    def _leave(self, *, by_itself: bool) -> None:
        self._has_ended = True
        self._deadline.cancel()
        if self.dispatch is not None:
            self.dispatch.booking.end(by_itself=by_itself)
        self._on_end(self, by_itself)

    def _expire(self) -> None:
        self.end(DeadlineExceeded(f"the request was not complete within {self._deadline_s:.3g} s"))


def slo_left(request: GenerationRequest, deadline_s: float, elapsed_s: float) -> Slo:
    """What is left of what was promised, so many seconds from `start`; `deadline_s` is from there
    on, too."""
    slo = request.slo
    return msgspec.structs.replace(
        slo,
        ttft_s=_less(slo.ttft_s, request.waited_s + elapsed_s),
        hold_s=_less(slo.hold_s, request.waited_s + elapsed_s),
        deadline_s=_less(deadline_s, elapsed_s),
    )


def _less(promised_s: float, elapsed_s: float) -> float:
    """What is left; never exactly 0, which stands for no promise at all."""
    return (promised_s - elapsed_s or -1e-9) if promised_s else 0.0
