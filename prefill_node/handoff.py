"""Handoffs: the KV that a prefill node holds for decode nodes, from the first chunk until settled.

    open ──announce──► announced ──publish──► published ──settle──► gone
      │                    │                     │
      └────────────end (finished, failed, cancelled, lease over)──► gone

A handoff holds its own reference to every announced block, so the request itself may end. All
announcements are repeated, with fresh tickets, for a subscriber that comes later (during the
prefill, or after a first decode node died), and for one that waited until its tickets became old.

Several answers to one prompt are handed off one by one, each under its own request id, when its
decode node subscribes. Their handoffs hold the same blocks, which are freed when the last handoff
ends. A subscriber that asks for everything at the end receives nothing before the end.

KV is normally announced at the end of the step that computes it. If that is much KV, it is
announced layer by layer while the step runs, so that little is left to pull after the last token.
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
from pdserve.node.session_server import HandoffMessage, Subscriber
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord
from prefill_node.held_kv import HeldKv, PinnedBlocks

log = logging.getLogger(__name__)

_MAX_LAYER_GROUPS = 8  # per step: with more groups the last one would hardly be smaller


@dataclass(slots=True)
class _Handoff:
    """The handoff of one request: the KV held for it, and its subscribers."""

    held: HeldKv
    is_open: bool = False  # its prefill leg has arrived
    was_pulled: bool = False  # by a subscriber
    record: HandoffRecord | None = None  # once the prefill is over
    # |-> whether it receives each part as it comes, instead of all at the end
    subscribers: dict[Subscriber, bool] = field(default_factory=dict)
    lease: asyncio.TimerHandle | None = None

    @property
    def is_followed(self) -> bool:
        return any(self.subscribers.values())

    def send(self, message: HandoffMessage) -> None:
        for subscriber in self.subscribers:
            subscriber(message)

    def send_to_followers(self, message: HandoffMessage) -> None:
        for subscriber, is_follower in self.subscribers.items():
            if is_follower:
                subscriber(message)


class Handoffs:
    """All handoffs of one node.

    `on_settled` is called for handoffs that every subscriber is done with, `on_expired` for those
    that nobody subscribed to within `lease_s`. During a step, KV is announced from `announce_bytes`
    on; with 0, never.
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
        """Number of blocks held for decode nodes to pull."""
        return len(self._pinned)

    def __len__(self) -> int:
        return len(self._handoffs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handoffs

    # ---- the prefill leg's side ----------------------------------------------------------------

    def open(self, request_id: str) -> None:
        """Open the handoff of a prefill leg that has arrived."""
        handoff = self._get_or_make(request_id)
        handoff.is_open = True
        self._stop_lease(handoff)  # started by a subscription that came first

    def begin_step(self, rows: Sequence[Scheduled]) -> list[int]:
        """Announce what the prefix cache has spared the step that is about to run.

        Returns the layer counts, ascending, after which `layers_done` will have enough KV to
        announce.
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
        """Announce what the running step has completed, `num_layers` layers, where it is enough."""
        for row in rows:
            if row.request.is_cancelled:
                continue
            for handoff in self._of(row.request):
                computed = row.request.num_computed_tokens + row.num_tokens
                self._announce_early(row.request, handoff, computed, num_layers)

    def announce(self, request: Request) -> None:
        """Announce the blocks that a finished step has completed, as far as not announced yet."""
        for handoff in self._of(request):
            computed = request.num_computed_tokens
            self._announce(
                request, handoff, handoff.held.missing(request, computed, self._num_layers)
            )

    def publish(self, request: Request, record: HandoffRecord) -> None:
        """Publish that the prefill is over, in one message with the last part to announce.

        `record` belongs to one of the request's answers. The lease starts, unless there is a
        subscriber.
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
            handoff.send_to_followers(replace(record, ticket=held.ticket(last)))
        for subscriber, is_follower in handoff.subscribers.items():
            if not is_follower:
                self._send_all(record.request_id, handoff, subscriber)
        if not handoff.subscribers:
            self._start_lease(record.request_id, handoff)

    def end(self, request_id: str, reason: PdserveError) -> None:
        """End a handoff and notify its subscribers; does nothing if there is none."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is None:
            return
        handoff.send(HandoffEnded(request_id=request_id, code=reason.code, message=reason.message))
        self._free(handoff)

    # ---- the sessions' side --------------------------------------------------------------------

    def subscribe(self, request_id: str, subscriber: Subscriber, *, at_end: bool = False) -> None:
        """As Announcer.subscribe; the prefill leg may not have arrived yet."""
        handoff = self._get_or_make(request_id)
        # A subscriber that subscribed several times unsubscribes only once.
        is_follower = handoff.subscribers.setdefault(subscriber, not at_end)
        if is_follower or handoff.record is not None:
            self._send_all(request_id, handoff, subscriber)
        if handoff.is_open:
            self._stop_lease(handoff)
        elif handoff.lease is None:
            self._start_lease(request_id, handoff)  # bounds the wait for a leg that never comes

    def renew(self, request_id: str, subscriber: Subscriber) -> None:
        """Repeat all announcements with fresh tickets, for a subscriber whose tickets are old."""
        handoff = self._handoffs.get(request_id)
        if handoff is not None and subscriber in handoff.subscribers:
            self._send_all(request_id, handoff, subscriber)

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """Remove a subscriber whose session broke."""
        handoff = self._leave(request_id, subscriber)
        if handoff is None or handoff.subscribers:
            return
        if handoff.was_pulled:  # another subscriber has the KV, and this was the last one
            self._settle(request_id)
        else:
            self._start_lease(request_id, handoff)

    def settle(self, request_id: str, subscriber: Subscriber, *, was_pulled: bool) -> None:
        """Remove a subscriber that has pulled the KV, or has given the request up.

        The last subscriber to settle frees the blocks. A message from a node that is not a
        subscriber is ignored: it belongs to an earlier handoff of the same request.
        """
        handoff = self._leave(request_id, subscriber)
        if handoff is None:
            return
        handoff.was_pulled |= was_pulled
        if not handoff.subscribers:
            self._settle(request_id)

    # ---- parts ---------------------------------------------------------------------------------

    def _of(self, request: Request) -> Iterator[_Handoff]:
        """Yield the handoffs to announce to now: the request's own, and those of followed siblings.

        Handoffs of the other siblings are announced at the end.
        """
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
                handoff.send_to_followers(
                    Announcement(request_id=handoff.held.request_id, ticket=ticket)
                )

    def _send_all(self, request_id: str, handoff: _Handoff, subscriber: Subscriber) -> None:
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
