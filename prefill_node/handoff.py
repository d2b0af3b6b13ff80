"""The handoff of one request: the KV that is held for it, and who is told of it.

The request is a prefill, or a stream that another node is to take over.

It holds its own reference to every announced block, so the request itself may end. All
announcements are repeated, with fresh tickets, for a subscriber that comes later (during the
prefill, or after a first decode node died), and for one that waited until its tickets became old.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from msgspec.structs import replace

from kv_transfer.exporter import Exporter
from kv_transfer.lifecycle import EXPORTER, BlockStates, ExporterMove, KvPart, Progress
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.kv import need
from pdserve.node.sessions.server import HandoffMessage, Subscriber
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord
from pdserve.shared.errors import PdserveError


class PinnedBlocks:
    """The blocks of a pool that are held for others; each counts once, whatever else holds it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_holders: Counter[int] = Counter()  # by block id; always > 0

    def __len__(self) -> int:
        return len(self._num_holders)

    def num_passed(self, num_tokens: int) -> int:
        """As BlockPool.num_passed."""
        return self._pool.num_passed(num_tokens)

    def hold(self, block_ids: Sequence[int], num_bare: int = 0) -> None:
        """Add a reference to each block, and to companions but for the first `num_bare`."""
        self._pool.retain(block_ids, num_bare)
        self._num_holders.update(block_ids)

    def release(self, block_ids: Sequence[int], num_bare: int = 0) -> None:
        """Drop one reference to each block, and to companions as `hold`."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 1:
                del self._num_holders[block_id]
            else:
                self._num_holders[block_id] -= 1
        self._pool.release(block_ids, num_bare)


class HeldKv:
    """Holds its own references to the announced blocks until `release`."""

    def __init__(self, request_id: str, exporter: Exporter, pinned: PinnedBlocks) -> None:
        self.block_ids: list[int] = []  # from the first token on
        self.request_id = request_id
        self.num_layers = exporter.layout.num_layers
        self._exporter = exporter
        self._layout = exporter.layout
        self._max_tokens = exporter.layout.tokens_in(exporter.max_ticket_blocks)
        self._pinned = pinned
        self._progress = Progress(self.num_layers)
        self._states = BlockStates(EXPORTER, request_id)
        self._state_blocks: list[int] = []  # of its state, once the request has ended here
        self._num_bare = 0  # leading blocks that windows have passed when the request is handed off

    def missing(self, request: Request, num_computed: int, num_layers: int) -> list[KvPart]:
        """Return the parts to announce once `num_computed` tokens have `num_layers` layers of KV.

        Ends at the last complete block, to which nothing will be written any more, or where the
        request ends here. (A step that fails for another request is repeated, and writes the same
        KV again, up to rounding.)
        """
        end_token = request.handed_off_at
        if end_token is None or num_computed < end_token:
            end_token = need.full_tokens(num_computed, self._layout.block_size)
        return self._in_tickets(self._progress.until(end_token, num_layers))

    def announce(self, request: Request, part: KvPart) -> None:
        """Mark the next part as announced, and hold its blocks from now on.

        For the blocks it makes no difference whether a subscriber is told now or later.
        """
        self._progress.take(part)
        blocks = request.block_table[len(self.block_ids) : self._layout.blocks_for(part.end_token)]
        if blocks:
            num_held, end = len(self.block_ids), request.handed_off_at
            if num_held == 0 and end is not None:
                self._num_bare = self._pinned.num_passed(end)
            self._pinned.hold(blocks, max(0, self._num_bare - num_held))
            self.block_ids += blocks  # to be released from now on, whatever fails next
            self._states.move(blocks, ExporterMove.HOLD)
        is_whole = part.end_layer == self.num_layers
        move = ExporterMove.ANNOUNCE if is_whole else ExporterMove.ANNOUNCE_PART
        self._states.move(self._blocks_of(part), move)

    def renew(self) -> list[KvPart]:
        """Return everything announced so far as parts, which are to be announced again."""
        parts = self._in_tickets(self._progress.whole())
        for part in parts:
            self._states.move(self._blocks_of(part), ExporterMove.RENEW)
        return parts

    def ticket(self, part: KvPart) -> bytes:
        """Issue a fresh ticket for an announced part."""
        return self._exporter.issue(
            self.request_id,
            part.first_token,
            part.end_token - part.first_token,
            self._blocks_of(part),
            part.layers,
        )

    def hold_state(self, request: Request) -> None:
        """Hold the state that the request has ended with, if the model has states."""
        if blocks := list(request.state_blocks):
            self._pinned.hold(blocks)
            self._state_blocks = blocks  # as in `announce`
            self._states.move(blocks, ExporterMove.HOLD)
            self._states.move(blocks, ExporterMove.ANNOUNCE)

    def state_ticket(self) -> bytes:
        """Issue a fresh ticket for the state: whole blocks, as if they were those of tokens."""
        blocks, tokens_in = self._state_blocks, self._layout.tokens_in
        if not blocks:
            return b""
        return self._exporter.issue(self.request_id, 0, tokens_in(len(blocks)), blocks)

    def num_bytes(self, parts: Sequence[KvPart]) -> int:
        """Return the size of the parts' KV."""
        num_cells = sum((part.end_token - part.first_token) * len(part.layers) for part in parts)
        return num_cells * self._layout.token_bytes // self.num_layers

    def release(self) -> None:
        """Release all held blocks, even those whose state does not allow it, which is a bug."""
        if self.block_ids:
            blocks, self.block_ids = self.block_ids, []
            self._pinned.release(blocks, self._num_bare)
            self._states.move(blocks, ExporterMove.RELEASE)
        if self._state_blocks:
            blocks, self._state_blocks = self._state_blocks, []
            self._pinned.release(blocks)
            self._states.move(blocks, ExporterMove.RELEASE)
        self._states.check_ended()

    def _in_tickets(self, parts: Sequence[KvPart]) -> list[KvPart]:
        """Split the parts into those of a ticket each.

        Some layers of a chunk can only be announced as one part. If that is too large, they are
        left out, and all its layers are announced at its end. So a chunk that has begun fits.
        """
        return [
            piece
            for part in parts
            for piece in part.pieces(self._max_tokens)
            if piece == part or part.end_layer == self.num_layers
        ]

    def _blocks_of(self, part: KvPart) -> list[int]:
        first_block = self._layout.full_blocks(part.first_token)
        return self.block_ids[first_block : self._layout.blocks_for(part.end_token)]


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
        held.hold_state(request)
        if self.is_followed:
            tickets = {"ticket": held.ticket(last), "state_ticket": held.state_ticket()}
            self._tell_followers(replace(record, **tickets))
        for subscriber, is_follower in self.subscribers.items():
            if not is_follower:
                self.repeat(subscriber)

    def repeat(self, subscriber: Subscriber) -> None:
        """Announce to a subscriber everything announced so far, with fresh tickets."""
        for index, part in enumerate(self.held.renew()):
            ticket, request_id = self.held.ticket(part), self.held.request_id
            subscriber(Announcement(request_id=request_id, ticket=ticket, is_restart=index == 0))
        if self.record is not None:
            subscriber(replace(self.record, state_ticket=self.held.state_ticket()))
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
