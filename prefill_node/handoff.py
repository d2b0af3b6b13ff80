"""Handoffs: what a prefill node holds for others to pull, from the first chunk until it is settled.

    open ──announce──► announced ──publish──► published ──settle──► gone
      │                    │                     │
      └────────────end (finished, failed, cancelled, lease over)──► gone

A handoff keeps a reference of its own to every announced block, so the request itself may end.
Everything is said again, with fresh tickets, to whoever subscribes later (half-way, or after a
first decode node died), and to whoever waited so long that its tickets are old.

Several answers to one prompt are handed over one by one, each under its own id, as its decode node
comes for it: their handoffs hold the same blocks, which are free when the last of them is over.
Who says when subscribing that it pulls nothing before the end hears nothing before it either.

What a step has completed is announced when it is over. Where that is much, it is announced layer by
layer while the step runs, so that little is left to pull when the last token is computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kv_transfer.exporter import Exporter
from kv_transfer.progress import KvPart
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.node.session_server import Said, Subscriber
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord
from prefill_node.held_kv import HeldKv, PinnedBlocks

log = logging.getLogger(__name__)

_MAX_LAYER_GROUPS = 8  # per step: with more of them the last one would hardly be smaller


@dataclass(slots=True)
class _Handoff:
    """One request's: what is held for it, and who listens."""

    held: HeldKv
    is_open: bool = False  # its prefill leg has arrived
    was_pulled: bool = False  # by one of its subscribers
    record: HandoffRecord | None = None  # once the prefill is over
    # |-> whether it hears of each part as it comes, and not of all at the end
    subscribers: dict[Subscriber, bool] = field(default_factory=dict)
    lease: asyncio.TimerHandle | None = None

    @property
    def is_followed(self) -> bool:
        return any(self.subscribers.values())

    def say(self, message: Said) -> None:
        for subscriber in self.subscribers:
            subscriber(message)

    def say_to_followers(self, message: Said) -> None:
        for subscriber, is_follower in self.subscribers.items():
            if is_follower:
                subscriber(message)


class Handoffs:
    """All handoffs of one node.

    `on_settled` hears of handoffs that every decode node is done with, `on_expired` of those that
    nobody came for within `lease_s`. In mid-step, KV is announced from `announce_bytes` on; 0: it
    never is.
    """

    def __init__(
        self,
        exporter: Exporter,
        pool: BlockPool,
        *,
        on_settled: Callable[[str], None],
        on_expired: Callable[[str, PdserveError], None],
        lease_s: float,
        announce_bytes: int,
    ) -> None:
        self._exporter = exporter
        self._pinned = PinnedBlocks(pool)
        self._on_settled = on_settled
        self._on_expired = on_expired
        self._lease_s = lease_s
        self._announce_bytes = announce_bytes
        self._num_layers = exporter.layout.num_layers
        self._handoffs: dict[str, _Handoff] = {}

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for pulling."""
        return len(self._pinned)

    def __len__(self) -> int:
        return len(self._handoffs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handoffs

    # ---- the prefill leg's side ----------------------------------------------------------------

    def open(self, request_id: str) -> None:
        """A prefill leg has arrived."""
        handoff = self._get_or_make(request_id)
        handoff.is_open = True
        self._stop_lease(handoff)  # of a subscription that came first

    def begin_step(self, rows: Sequence[Scheduled]) -> list[int]:
        """A step is about to run: announce what the prefix cache has spared it.

        Returns after how many layers, ascending, there will be enough for `layers_done`.
        """
        if not self._announce_bytes or not self._handoffs:
            return []
        most_bytes = 0
        for row in rows:
            for handoff in self._of(row.request):
                computed = row.request.num_computed_tokens
                self._announce_early(row.request, handoff, computed, self._num_layers)
                to_come = handoff.held.missing(
                    row.request, computed + row.num_tokens, self._num_layers
                )
                most_bytes = max(most_bytes, sum(map(handoff.held.num_bytes, to_come)))
        if most_bytes <= self._announce_bytes:
            return []
        enough = -(-self._num_layers * self._announce_bytes // most_bytes)
        group = max(enough, -(-self._num_layers // _MAX_LAYER_GROUPS))
        return list(range(group, self._num_layers, group))

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """The running step has completed so many layers of its rows: announce what is enough."""
        for row in rows:
            if row.request.is_cancelled:
                continue
            for handoff in self._of(row.request):
                computed = row.request.num_computed_tokens + row.num_tokens
                self._announce_early(row.request, handoff, computed, num_layers)

    def announce(self, request: Request) -> None:
        """A step is over: announce (the rest of) the blocks that it has completed."""
        for handoff in self._of(request):
            computed = request.num_computed_tokens
            self._announce(
                request, handoff, handoff.held.missing(request, computed, self._num_layers)
            )

    def publish(self, request: Request, record: HandoffRecord) -> None:
        """The prefill is over: say so, in one message with what is left to announce.

        `record` is of one of the request's answers. Its lease starts, unless somebody listens.
        """
        handoff = self._handoffs.get(record.request_id)
        if handoff is None:
            return
        handoff.record = record
        held = handoff.held
        *earlier, last = held.missing(request, request.num_prompt_tokens, self._num_layers)
        self._announce(request, handoff, earlier)
        held.announce(request, last)
        if handoff.is_followed:
            handoff.say_to_followers(replace(record, ticket=held.ticket(last)))
        for subscriber, is_follower in handoff.subscribers.items():
            if not is_follower:
                self._say_all(record.request_id, handoff, subscriber)
        if not handoff.subscribers:
            self._start_lease(record.request_id, handoff)

    def end(self, request_id: str, reason: PdserveError) -> None:
        """There is nothing (more) to pull; harmless when there was no handoff."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is None:
            return
        handoff.say(HandoffEnded(request_id=request_id, code=reason.code, message=reason.message))
        self._free(handoff)

    # ---- the sessions' side --------------------------------------------------------------------

    def subscribe(self, request_id: str, subscriber: Subscriber, *, at_end: bool = False) -> None:
        """As Announcer.subscribe; the request may not have arrived yet."""
        handoff = self._get_or_make(request_id)
        # It unsubscribes once, however often it asked.
        is_follower = handoff.subscribers.setdefault(subscriber, not at_end)
        if is_follower or handoff.record is not None:
            self._say_all(request_id, handoff, subscriber)
        if handoff.is_open:
            self._stop_lease(handoff)
        elif handoff.lease is None:
            self._start_lease(request_id, handoff)  # bounds the wait for a leg that never comes

    def renew(self, request_id: str, subscriber: Subscriber) -> None:
        """A subscriber's tickets are old: say everything again."""
        handoff = self._handoffs.get(request_id)
        if handoff is not None and subscriber in handoff.subscribers:
            self._say_all(request_id, handoff, subscriber)

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """A subscriber's session broke."""
        handoff = self._leave(request_id, subscriber)
        if handoff is None or handoff.subscribers:
            return
        if handoff.was_pulled:  # this one was the last of several, and another one has it
            self._settle(request_id)
        else:
            self._start_lease(request_id, handoff)

    def settle(self, request_id: str, subscriber: Subscriber, *, was_pulled: bool) -> None:
        """A subscriber has what it needs, or has given the request up.

        The last one to settle frees the blocks. One that is no subscriber means a former handoff of
        the same request.
        """
        handoff = self._leave(request_id, subscriber)
        if handoff is None:
            return
        handoff.was_pulled |= was_pulled
        if not handoff.subscribers:
            self._settle(request_id)

    # ---- parts ---------------------------------------------------------------------------------

    def _of(self, request: Request) -> Iterator[_Handoff]:
        """Its own, and those of its siblings that somebody follows: the rest wait for the end."""
        for answer in request.answers:
            handoff = self._handoffs.get(answer.request_id)
            if handoff is not None and (answer is request or handoff.is_followed):
                yield handoff

    def _get_or_make(self, request_id: str) -> _Handoff:
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            held = HeldKv(request_id, self._exporter, self._pinned)
            handoff = self._handoffs[request_id] = _Handoff(held)
        return handoff

    def _announce_early(
        self, request: Request, handoff: _Handoff, num_computed: int, num_layers: int
    ) -> None:
        parts = handoff.held.missing(request, num_computed, num_layers)
        if sum(map(handoff.held.num_bytes, parts)) >= self._announce_bytes:
            self._announce(request, handoff, parts)

    def _announce(self, request: Request, handoff: _Handoff, parts: Sequence[KvPart]) -> None:
        for part in parts:
            handoff.held.announce(request, part)
            if handoff.is_followed:
                ticket = handoff.held.ticket(part)
                handoff.say_to_followers(
                    Announcement(request_id=handoff.held.request_id, ticket=ticket)
                )

    def _say_all(self, request_id: str, handoff: _Handoff, subscriber: Subscriber) -> None:
        for index, part in enumerate(handoff.held.renew()):
            ticket = handoff.held.ticket(part)
            subscriber(Announcement(request_id=request_id, ticket=ticket, is_restart=index == 0))
        if handoff.record is not None:
            subscriber(handoff.record)

    def _leave(self, request_id: str, subscriber: Subscriber) -> _Handoff | None:
        handoff = self._handoffs.get(request_id)
        if handoff is None or subscriber not in handoff.subscribers:
            return None
        del handoff.subscribers[subscriber]
        return handoff

    def _settle(self, request_id: str) -> None:
        handoff = self._handoffs.pop(request_id)
        log.debug("handoff of %s settled, pulled: %s", request_id, handoff.was_pulled)
        self._free(handoff)
        self._on_settled(request_id)

    def _start_lease(self, request_id: str, handoff: _Handoff) -> None:
        self._stop_lease(handoff)
        loop = asyncio.get_running_loop()
        handoff.lease = loop.call_later(self._lease_s, self._expire, request_id)

    def _stop_lease(self, handoff: _Handoff) -> None:
        if handoff.lease is not None:
            handoff.lease.cancel()
            handoff.lease = None

    def _expire(self, request_id: str) -> None:
        handoff = self._handoffs[request_id]
        waited_for = "puller" if handoff.is_open else "prefill leg"
        error = DeadlineExceeded(f"no {waited_for} of {request_id} came within {self._lease_s} s")
        log.warning("%s", error)
        self.end(request_id, error)
        if handoff.is_open:
            self._on_expired(request_id, error)

    def _free(self, handoff: _Handoff) -> None:
        self._stop_lease(handoff)
        handoff.held.release()
