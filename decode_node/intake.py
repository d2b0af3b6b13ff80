"""Taking a request over from a prefill node, while its prompt is still being prefilled.

    subscribe ──► first announcement ──► wait for room ──► pull, announcement by announcement
              ──► handoff record ──► settle, adopt

Subscribing comes first: from then on the prefill node knows that somebody will come for the blocks,
and this node hears at once when there is nothing left to come for. Room is given first come first
served; until there is room, the KV waits on the prefill node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from kv_transfer.puller import Puller
from pdserve.clock import Clock
from pdserve.engine.block_hash import hash_chain
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.errors import MalformedMessage, PeerLost, TransferCancelled
from pdserve.lifecycle import Lifecycle
from pdserve.node.session_client import Notice, Session, Sessions
from pdserve.protocol import Announcement, DecodeLeg, HandoffRecord, NodeAddress


@dataclass(frozen=True, slots=True)
class _Room:
    """Blocks for the prompt and token 1; the first of them from this node's own prefix cache."""

    block_table: list[int]
    num_cached_tokens: int


class Intake:
    """Brings handed-over requests into the engine."""

    def __init__(
        self, engine: Engine, sessions: Sessions, puller: Puller, clock: Clock, transfer_s: float
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._puller = puller
        self._clock = clock
        self._transfer_s = transfer_s
        self._waiting: deque[asyncio.Event] = deque()  # for room, in order of arrival
        engine.pool.on_release(self.offer_room)

    @property
    def num_waiting(self) -> int:
        """Requests whose KV is ready elsewhere and for which there is no room here yet."""
        return len(self._waiting)

    def offer_room(self) -> None:
        """There may be room: let the first in line have a look."""
        if self._waiting:
            self._waiting[0].set()

    async def take(self, leg: DecodeLeg, source: NodeAddress) -> None:
        """Pull the leg's KV from `source` and hand the request to the engine.

        However it ends, no block is lost or written to later: `Puller.pull` does not return or
        raise while anything may still write to its destination.

        Raises:
            PdserveError: the exporter is gone, the handoff ended, or a pull failed.
        """
        lifecycle = Lifecycle(received_s=self._clock.now())
        session = await self._sessions.get(source)
        was_pulled = False
        try:
            async with aclosing(session.notices(leg.request_id)) as notices:
                request = await self._receive(leg, session, notices, lifecycle)
            was_pulled = True
        finally:
            session.settle(leg.request_id, was_pulled=was_pulled)
        self._engine.adopt(request)

    async def _receive(
        self,
        leg: DecodeLeg,
        session: Session,
        notices: AsyncIterator[Notice],
        lifecycle: Lifecycle,
    ) -> Request:
        """The request with its prompt's KV in blocks of this node."""
        first = await anext(notices)
        hashes = hash_chain(leg.token_ids, self._engine.pool.block_size, leg.cache_salt)
        room = await self._wait_for_room(session, leg.request_id, len(leg.token_ids) + 1, hashes)
        try:
            record = await self._pull(session, first, notices, room, lifecycle)
            if record.num_tokens != len(leg.token_ids) or len(record.token_ids) != 1:
                raise MalformedMessage(
                    f"{leg.request_id} was handed over with {record.num_tokens} prompt tokens and "
                    f"{len(record.token_ids)} of output, not {len(leg.token_ids)} and 1"
                )
        except BaseException:
            self._engine.pool.release(room.block_table)
            raise
        return Request(
            request_id=leg.request_id,
            prompt_token_ids=leg.token_ids,
            sampling=leg.sampling,
            lifecycle=lifecycle,
            cache_salt=leg.cache_salt,
            output_token_ids=list(record.token_ids),
            num_computed_tokens=record.num_tokens,
            num_cached_tokens=record.cached_tokens,
            block_table=room.block_table,
            block_hashes=hashes,
        )

    async def _pull(
        self,
        session: Session,
        first: Notice,
        notices: AsyncIterator[Notice],
        room: _Room,
        lifecycle: Lifecycle,
    ) -> HandoffRecord:
        """Pull what is announced, as it is announced, up to the handoff record."""
        notice, num_pulled = first, 0
        while isinstance(notice.message, Announcement):
            try:
                result = await self._puller.pull(
                    session.link,
                    notice.message.ticket,
                    room.block_table,
                    room.num_cached_tokens,
                    self._transfer_s,
                )
            except TransferCancelled as error:  # the session ended, and its link with it
                raise PeerLost(f"{session.peer.node_id} was lost during a transfer") from error
            if result.first_token != num_pulled:
                raise MalformedMessage(
                    f"after {num_pulled} tokens of {notice.message.request_id} came a ticket for "
                    f"those from {result.first_token} on"
                )
            num_pulled = result.end_token
            lifecycle.transfer_s += result.seconds
            lifecycle.pulled_s = self._clock.now()
            notice = await anext(notices)
        record = notice.message
        if record.num_tokens != num_pulled:
            raise MalformedMessage(
                f"{record.request_id} was announced up to token {num_pulled}, its handoff record "
                f"says {record.num_tokens}"
            )
        lifecycle.record_s = notice.received_s
        return record

    async def _wait_for_room(
        self, session: Session, request_id: str, num_tokens: int, hashes: list[bytes]
    ) -> _Room:
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while True:
                if self._waiting[0] is turn:
                    reserved = self._engine.reserve(num_tokens, hashes)
                    if reserved is not None:
                        block_table, num_reused = reserved
                        return _Room(block_table, num_reused * self._engine.pool.block_size)
                turn.clear()
                await session.wait(request_id, turn)
        finally:
            self._waiting.remove(turn)
            self.offer_room()
