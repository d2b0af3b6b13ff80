"""The handoff of one request: the KV that is held for it, and who is told of it.

The request is a prefill, or a stream that another node is to take over.

It holds its own reference to every announced block, so the request itself may end. All
announcements are repeated, with fresh tickets, for a subscriber that comes later (during the
prefill, or after a first decode node died), and for one that waited until its tickets became old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from msgspec.structs import replace

from kv_transfer.progress import KvPart
from pdserve.engine.request import Request
from pdserve.errors import PdserveError
from pdserve.node.sessions.server import HandoffMessage, Subscriber
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord
from prefill_node.held_kv import HeldKv


@dataclass(slots=True)
class Handoff:
    """One request's; `end` must be called."""

    held: HeldKv
    is_open: bool = False  # its prefill leg has arrived
    was_pulled: bool = False  # by a subscriber
    record: HandoffRecord | None = None  # once the request has ended here
    stream: Request | None = None  # that decodes here, to be taken over; None: a prefill
    num_emitted: int = 0  # output tokens of the stream that its subscriber knows
    taker: str = ""  # the subscriber's leg; empty: its build does not say
    # |-> whether it receives each part as it comes, instead of all at the end
    subscribers: dict[Subscriber, bool] = field(default_factory=dict)
    _lease: asyncio.TimerHandle | None = None

    @property
    def is_followed(self) -> bool:
        """Whether a subscriber receives each part as it comes."""
        return any(self.subscribers.values())

    @property
    def goes_on_here(self) -> bool:
        """Whether it is of a stream that nobody has taken over yet."""
        return self.stream is not None and self.record is None

    @property
    def is_leased(self) -> bool:
        """Whether it ends by itself if nothing more comes."""
        return self._lease is not None

    def announce(self, request: Request, parts: Sequence[KvPart]) -> None:
        """Announce the next parts to all who follow."""
        for part in parts:
            self.held.announce(request, part)
            if self.is_followed:
                ticket = self.held.ticket(part)
                message = Announcement(request_id=self.held.request_id, ticket=ticket)
                self._tell_followers(message)

    def announce_if(
        self, request: Request, num_computed: int, num_layers: int, least_bytes: int
    ) -> None:
        """Announce what `num_computed` tokens have in `num_layers` layers, if it is enough KV."""
        parts = self.held.missing(request, num_computed, num_layers)
        if self.held.num_bytes(parts) >= least_bytes:
            self.announce(request, parts)

    def announce_complete(self, stream: Request) -> bool:
        """Announce what the stream has completed, and that this is all; False: there is nothing."""
        parts = self.held.missing(stream, stream.num_computed_tokens, self.held.num_layers)
        self.announce(stream, parts)
        if parts:
            self._tell_followers(self._all_so_far())
        return len(parts) > 0

    def publish(self, request: Request, record: HandoffRecord) -> None:
        """Announce the rest, its last part together with `record`."""
        self.record = record
        held = self.held
        *earlier, last = held.missing(request, request.num_computed_tokens, held.num_layers)
        self.announce(request, earlier)
        held.announce(request, last)
        if self.is_followed:
            self._tell_followers(replace(record, ticket=held.ticket(last)))
        for subscriber, is_follower in self.subscribers.items():
            if not is_follower:
                self.repeat(subscriber)

    def repeat(self, subscriber: Subscriber) -> None:
        """Announce to a subscriber everything announced so far, with fresh tickets."""
        for index, part in enumerate(self.held.renew()):
            ticket, request_id = self.held.ticket(part), self.held.request_id
            subscriber(Announcement(request_id=request_id, ticket=ticket, is_restart=index == 0))
        if self.record is not None:
            subscriber(self.record)
        elif self.stream is not None:
            subscriber(self._all_so_far())

    def start_lease(self, lease_s: float, expired: Callable[[], None]) -> None:
        """Call `expired` after `lease_s`, unless the lease is stopped or started again."""
        self.stop_lease()
        self._lease = asyncio.get_running_loop().call_later(lease_s, expired)

    def stop_lease(self) -> None:
        """Stop the lease, if there is one."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def end(self, reason: PdserveError | None = None) -> None:
        """Release the blocks; subscribers that are left are told the reason.

        A stream that nobody has taken over goes on here. All of this is tried, whatever fails; the
        last failure is raised.
        """
        if self.stream is not None and self.record is None:
            self.stream.leg_token_limit = None
        with ExitStack() as ending:
            if reason is not None:
                request_id, code, message = self.held.request_id, reason.code, reason.message
                ended = HandoffEnded(request_id=request_id, code=code, message=message)
                for subscriber in self.subscribers:
                    ending.callback(subscriber, ended)
            ending.callback(self.held.release)
            ending.callback(self.stop_lease)

    def _all_so_far(self) -> Announcement:
        return Announcement(request_id=self.held.request_id, ticket=b"")

    def _tell_followers(self, message: HandoffMessage) -> None:
        for subscriber, is_follower in self.subscribers.items():
            if is_follower:
                subscriber(message)
