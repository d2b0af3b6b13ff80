"""The KV of one handed-off request: pulled as it is announced, into blocks of this node.

`Arrival` has the state of each block; `AnnouncedPulls` follows the announcements.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from decode_node.room import Room
from kv_transfer.lifecycle import PULLER, BlockStates, KvPart, Progress, PullerMove
from kv_transfer.puller import PullResult, Pulls
from kv_transfer.ticket import read_ticket
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.lifecycle import RecordTimes, Span
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.sessions.session import Notice, Session, Subscription
from pdserve.protocol import Announcement, HandoffRecord
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.clock import Clock
from pdserve.shared.errors import (
    MalformedMessage,
    PeerLost,
    StaleIncarnation,
    TicketInvalid,
    TransferCancelled,
    TransferTimeout,
)


class Arrival:
    """Owns the room's blocks until `adopt` or `release`, one of which must be called."""

    def __init__(
        self,
        request_id: str,
        num_tokens: int,
        room: Room,
        session: Session,
        pool: BlockPool,
        most_tokens: int | None = None,
    ) -> None:
        """
        Args:
            request_id: the request whose KV arrives.
            num_tokens: of it that are known here: the prompt, and a stream's output so far.
            room: the blocks reserved for these tokens and the next one.
            session: the session with the exporter.
            pool: the pool that the room's blocks belong to.
            most_tokens: that may come with KV, if it is a stream, which goes on meanwhile.
        """
        self.block_table = room.block_table
        self.num_tokens = most_tokens or num_tokens  # with KV; exact from `ends_with` on
        self._num_known = num_tokens
        self.copies: list[Span] = []  # when KV was copied
        self._request_id = request_id
        self._session = session
        self._pool = pool
        self._num_passed = room.num_passed
        self._num_complete = pool.tokens_in(room.num_reused)  # tokens here, in all layers
        self._num_valid = self._num_reused = room.num_reused  # blocks
        self._announced = Progress(session.link.welcome.layout.num_layers)
        self._states = BlockStates(PULLER, request_id)
        self._states.move(room.block_table[: room.num_reused], PullerMove.REUSE)
        self._states.move(room.block_table[room.num_reused :], PullerMove.RESERVE)
        self._state_blocks = room.state_blocks
        self._states.move(self._state_blocks, PullerMove.RESERVE)

    @property
    def num_announced_tokens(self) -> int:
        """Tokens announced so far, in all layers; all of them have been pulled."""
        return self._announced.num_tokens

    def restart(self) -> None:
        """Note that the exporter announces from the beginning again; KV already pulled is kept."""
        self._announced = Progress(self._session.link.welcome.layout.num_layers)

    def ends_with(self, record: HandoffRecord) -> None:
        """Note where the KV ends, before its last part is pulled.

        Raises:
            MalformedMessage: the record does not match what is known of the request.
        """
        num_tokens, num_new = record.num_tokens, len(record.token_ids)
        if not 0 < num_new == num_tokens - self._num_known + 1 or num_tokens > self.num_tokens:
            raise MalformedMessage(
                f"{record.request_id} was handed off with {num_tokens} tokens and {num_new} that "
                f"are not known here; {self._num_known} tokens are known, and {self.num_tokens} "
                "may come"
            )
        self.num_tokens = num_tokens
        num_blocks = self._pool.blocks_for(num_tokens)
        if self._num_complete == num_tokens and self._num_valid < num_blocks:
            last = self.block_table[self._num_valid : num_blocks]  # no more of it has to be read
            self._states.move(last, PullerMove.PULL)
            self._states.move(last, PullerMove.VALIDATE)
            self._num_valid = num_blocks

    async def pull(
        self, puller: Pulls, ticket: bytes, clock: Clock, timeout_s: float
    ) -> PullResult:
        """Pull the next announced part.

        Raises:
            MalformedMessage: the part does not follow the previous one.
            OutOfBlocks: the stream has grown beyond its room, and there is no more.
            PdserveError: the pull failed; as Puller.pull.
        """
        part = self._next_part(ticket)
        end_block = self._pool.blocks_for(part.end_token)
        self._grow(end_block)
        first = max(part.first_token, self._num_complete)
        first_block = self._pool.full_blocks(first)
        blocks = self.block_table[first_block:end_block]
        if first >= part.end_token:
            blocks = []
        self._states.move(blocks, PullerMove.PULL)
        try:
            result = await puller.pull(
                self._session.link,
                ticket,
                self.block_table,
                self._num_complete,
                timeout_s,
                num_tokens=self._num_known,
            )
        except BaseException as error:
            self._states.move(blocks, PullerMove.FAIL)
            if isinstance(error, TransferCancelled):
                raise self._lost() from error
            raise
        ended_s = clock.now()
        self.copies.append((ended_s - result.read_s, ended_s))
        self._arrived(blocks, first_block)
        return result

    async def pull_state(self, puller: Pulls, ticket: bytes, timeout_s: float) -> None:
        """Pull the state that the request has ended with there, if the model has states.

        Raises:
            MalformedMessage: it is not there, or of other blocks than here.
            PdserveError: as `pull`.
        """
        blocks, tokens_in = self._state_blocks, self._pool.tokens_in
        here = tokens_in(len(blocks))
        there = read_ticket(ticket).num_tokens if ticket else 0
        sizes = [self._session.link.welcome.layout.block_size, self._pool.block_size]
        if there != here or (blocks and sizes[0] != sizes[1]):
            raise MalformedMessage(
                f"{self._request_id} came with a state of {there} tokens' blocks of {sizes[0]}, "
                f"and takes {here} in blocks of {sizes[1]}: give all nodes one engine.block_size"
            )
        if not blocks:
            return
        self._states.move(blocks, PullerMove.PULL)
        try:
            await puller.pull(self._session.link, ticket, blocks, 0, timeout_s)
        except BaseException as error:
            self._states.move(blocks, PullerMove.FAIL)
            if isinstance(error, TransferCancelled):
                raise self._lost() from error
            raise
        self._states.move(blocks, PullerMove.VALIDATE)

    def _lost(self) -> PeerLost:
        """The session ended, and its link with it."""
        return PeerLost(f"{self._session.peer.node_id} was lost during a transfer")

    def adopt(self) -> None:
        """Hand the blocks to the engine; the KV of every token must be here."""
        assert self._num_valid == self._pool.blocks_for(self.num_tokens)
        self._states.move(self.block_table[: self._num_valid], PullerMove.ADOPT)
        self._states.move(self.block_table[self._num_valid :], PullerMove.ADOPT_BLANK)
        self._states.move(self._state_blocks, PullerMove.ADOPT)
        self._states.check_ended()
        theirs = self._session.link.welcome.layout
        self._pool.lack_windows(
            self.block_table,
            self._num_reused,
            self.num_tokens,
            is_aligned=theirs.block_size == self._pool.block_size,
        )

    def release(self) -> None:
        """Release the blocks; nothing may write to them any more."""
        self._states.move(self.block_table, PullerMove.RELEASE)
        self._states.move(self._state_blocks, PullerMove.RELEASE)
        self._states.check_ended()
        self._pool.release(self.block_table, self._num_passed)
        self._pool.release(self._state_blocks)

    def _grow(self, num_blocks: int) -> None:
        num_missing = num_blocks - len(self.block_table)
        if num_missing > 0:
            blocks = self._pool.allocate(num_missing)
            self._states.move(blocks, PullerMove.RESERVE)
            self.block_table += blocks

    def _next_part(self, ticket: bytes) -> KvPart:
        opened = read_ticket(ticket)
        part = KvPart(opened.first_token, opened.end_token, opened.first_layer, opened.end_layer)
        if part.end_token > self.num_tokens:
            raise MalformedMessage(
                f"{self._request_id} has at most {self.num_tokens} tokens, not {part.end_token}"
            )
        self._announced.take(part)
        return part

    def _arrived(self, blocks: list[int], first_block: int) -> None:
        """Mark pulled blocks as valid where they are complete, otherwise as partly valid."""
        self._num_complete = max(self._num_complete, self._announced.num_tokens)
        num_valid = self._pool.full_blocks(self._num_complete)
        if self._num_complete == self.num_tokens:  # nothing more comes for the last block
            num_valid = self._pool.blocks_for(self.num_tokens)
        num_new = max(0, num_valid - first_block)
        self._states.move(blocks[:num_new], PullerMove.VALIDATE)
        self._states.move(blocks[num_new:], PullerMove.VALIDATE_PART)
        self._num_valid = max(self._num_valid, num_valid)


log = logging.getLogger(__name__)

_OLD: Final = 0.5  # share of its lifetime after which a ticket is renewed


@dataclass(frozen=True, slots=True)
class ReceivedHandoff:
    """A request whose KV has arrived completely."""

    record: HandoffRecord
    prefill_end_s: float  # on this node's clock
    times: RecordTimes


class AnnouncedPulls:
    """Follows announcements from the first one to the handoff record, and pulls each part."""

    def __init__(
        self,
        puller: Pulls,
        costs: PullCosts,
        clock: Clock,
        timeouts: NodeTimeouts,
        host_id: str,
    ) -> None:
        """`costs` learn from every pull."""
        self.num_renewals = 0  # of tickets that had become old
        self._puller = puller
        self._costs = costs
        self._clock = clock
        self._timeouts = timeouts
        self._host_id = host_id

    async def receive(
        self, first: Notice, subscription: Subscription, session: Session, arrival: Arrival
    ) -> ReceivedHandoff:
        """Pull all of a request's KV; `first` is the first notice of its subscription.

        A stream ends on its node, and its record comes, once what it has completed is here.

        Raises:
            MalformedMessage: the handoff record does not match the leg or the announcements.
            PdserveError: the handoff ended, or a pull failed; as Arrival.pull.
        """
        notice, was_refused = first, False
        while True:
            message = notice.message
            if _tickets_of(message) and self._is_old(notice):
                self.num_renewals += 1
                notice = await subscription.renew()
                continue
            if isinstance(message, Announcement) and message.is_restart:
                arrival.restart()
            if isinstance(message, HandoffRecord):
                arrival.ends_with(message)
            elif not message.ticket:
                subscription.take_over()
            pulling_s = self._clock.now()
            try:
                if message.ticket:
                    await self._pull(arrival, message.ticket, session)
                if isinstance(message, HandoffRecord):
                    _check_announced(message, arrival)
                    state_ticket, transfer_s = message.state_ticket, self._timeouts.transfer_s
                    await arrival.pull_state(self._puller, state_ticket, transfer_s)
                    return self._received(message, notice, session, pulling_s)
            except (TicketInvalid, StaleIncarnation) as error:  # damaged on the way, perhaps
                if was_refused:
                    raise
                log.warning("a ticket was refused, and is renewed: %s", error)
                was_refused = True
                notice = await subscription.renew()
                continue
            notice = await subscription.next()

    async def _pull(self, arrival: Arrival, ticket: bytes, session: Session) -> None:
        transport, num_bytes = session.link.transport, _num_bytes(ticket, session)
        timeout_s = self._costs.deadline_s(transport, num_bytes, self._timeouts.transfer_s)
        started_s = self._clock.now()
        try:
            pulled = await arrival.pull(self._puller, ticket, self._clock, timeout_s)
        except TransferTimeout:
            self._costs.observe_at_least(transport, num_bytes, self._clock.now() - started_s)
            raise
        if pulled.bytes:
            self._costs.observe_pull(transport, pulled.bytes, pulled.seconds)

    def _is_old(self, notice: Notice) -> bool:
        age_s = self._clock.now() - notice.received_s
        return age_s > self._timeouts.ticket_s * _OLD

    def _received(
        self, record: HandoffRecord, notice: Notice, session: Session, pulling_s: float
    ) -> ReceivedHandoff:
        """Make the result; from another host, whose clock differs, times begin with the reading."""
        read_s = end_s = made_s = written_s = notice.received_s
        if session.link.welcome.host_id == self._host_id:
            end_s = min(record.prefill_end_s, read_s)
            made_s = min(max(record.made_s, end_s), read_s)
            written_s = min(max(record.written_s, made_s), read_s)
        times = RecordTimes(made_s, written_s, read_s, pulling_s, self._clock.now())
        return ReceivedHandoff(record, end_s, times)


def _num_bytes(ticket: bytes, session: Session) -> int:
    """The most bytes that a ticket brings. Raises TicketInvalid."""
    opened, layout = read_ticket(ticket), session.link.welcome.layout
    num_layers = opened.end_layer - opened.first_layer
    return opened.num_tokens * layout.token_bytes * num_layers // layout.num_layers


def _tickets_of(message: Announcement | HandoffRecord) -> bytes:
    """What can become old; empty: nothing."""
    return message.ticket or (message.state_ticket if isinstance(message, HandoffRecord) else b"")


def _check_announced(record: HandoffRecord, arrival: Arrival) -> None:
    """Check that the announcements before the record have left nothing out."""
    if arrival.num_announced_tokens != record.num_tokens:
        raise MalformedMessage(
            f"{record.request_id} was announced up to token {arrival.num_announced_tokens}, its "
            f"handoff record says {record.num_tokens}"
        )
