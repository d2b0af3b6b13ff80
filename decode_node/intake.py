"""Takes over a request from a prefill node while its prompt is still being prefilled.

    subscribe ──► host tier ──► first notice ──► wait for room
              ──► pull, announcement by announcement ──► handoff record ──► settle, adopt

Subscribing comes first: it tells the prefill node that the blocks will be pulled, and this node is
notified at once if the handoff ends without KV to pull. During the prefill, this node's own host
tier is searched for blocks of the prompt, which then need not be pulled. The KV stays on the
prefill node until the decode policy has a place for the request and the pool has room. Tickets that
have become old by then are renewed.
"""

from __future__ import annotations

from typing import Final

from decode_node.arrival import Arrival
from decode_node.policies.interface import DecodePolicy
from decode_node.prompt_pulls import PromptPulls
from decode_node.room import RoomQueue
from kv_transfer.puller import Puller
from pdserve.clock import Clock
from pdserve.config import Timeouts
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.errors import MalformedMessage
from pdserve.grammar import CompiledGrammar
from pdserve.metrics import NodeMetrics
from pdserve.node.prefix_fetch import PrefixFetcher
from pdserve.node.prefix_parts import Prefix
from pdserve.node.session_client import Session, Sessions
from pdserve.node.subscription import Notice, Subscription
from pdserve.node.translation import request_of
from pdserve.protocol import (
    Announcement,
    DecodeLeg,
    HandoffRecord,
    NodeAddress,
    PrefixSource,
)

_OLD: Final = 0.5  # share of its lifetime after which a ticket is renewed


class Intake:
    """Brings handed-off requests into the engine."""

    def __init__(
        self,
        engine: Engine,
        policy: DecodePolicy,
        prefixes: PrefixFetcher,
        sessions: Sessions,
        puller: Puller,
        clock: Clock,
        timeouts: Timeouts,
        host_id: str,
        metrics: NodeMetrics,
    ) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._sessions = sessions
        self._puller = puller
        self._clock = clock
        self._timeouts = timeouts
        self._host_id = host_id
        self._metrics = metrics
        self.num_renewals = 0
        self._room = RoomQueue(engine, policy, clock)
        self._pulls = PromptPulls()

    @property
    def num_waiting(self) -> int:
        """Requests with KV on a prefill node that wait for room here."""
        return len(self._room)

    def offer_room(self) -> None:
        """Check again for room, since some may have been freed."""
        self._room.offer()

    async def take(
        self, leg: DecodeLeg, source: NodeAddress, grammar: CompiledGrammar | None = None
    ) -> None:
        """Pull the leg's KV from `source` and hand the request to the engine.

        However this ends, no block is leaked or written to later: `Puller.pull` does not return or
        raise while anything may still write to its destination.

        Raises:
            PdserveError: the exporter is lost, the handoff ended, or a pull failed.
        """
        request = self._expected(leg, source)
        request.grammar = grammar
        session = await self._sessions.get(source)
        async with (
            session.subscribed(leg.request_id, at_end=leg.prompt_id in self._pulls) as subscription,
            self._pulls.turn(leg.prompt_id, subscription),
        ):
            await self._receive(request, session, subscription)
            subscription.was_pulled = True
            request.lifecycle.adopted_s = self._clock.now()
            self._engine.adopt(request)

    def _expected(self, leg: DecodeLeg, source: NodeAddress) -> Request:
        """Make the leg's request, without KV or token 1 yet."""
        sources = [PrefixSource(node=source, num_tokens=len(leg.token_ids))]
        request = request_of(leg, self._clock.now(), sources)
        request.extend_hashes(request.num_tokens, self._engine.pool.block_size)
        return request

    async def _receive(
        self, request: Request, session: Session, subscription: Subscription
    ) -> None:
        """Receive the prompt's KV into blocks of this node, and token 1 with it."""
        num_tokens, lifecycle = request.num_prompt_tokens, request.lifecycle
        prefix = Prefix(request.prompt_token_ids, request.cache_salt, request.block_hashes)
        await self._prefixes.fetch(prefix, ())  # only from the host tier
        first = await subscription.next()
        room = await self._room.take(subscription, request)
        arrival = Arrival(request.request_id, num_tokens, room, session, self._engine.pool)
        try:
            record, received_s = await self._pull(first, subscription, arrival)
            _check_record(record, num_tokens, arrival)
        except BaseException:
            self._room.leave(request)
            arrival.release()
            raise
        arrival.adopt()
        self._room.arrived(request)
        is_here = session.link.welcome.host_id == self._host_id  # clocks of hosts differ
        lifecycle.prefill_end_s = min(record.prefill_end_s, received_s) if is_here else received_s
        lifecycle.room_wait = room.waited
        lifecycle.copies = arrival.copies
        start_s, end_s = room.waited
        self._metrics.room_wait.observe(end_s - start_s)
        request.output_token_ids = list(record.token_ids)
        request.num_computed_tokens = record.num_tokens
        request.num_cached_tokens = record.cached_tokens

    async def _pull(
        self, first: Notice, subscription: Subscription, arrival: Arrival
    ) -> tuple[HandoffRecord, float]:
        """Pull each part as it is announced; return the handoff record, and when it came."""
        notice = first
        while True:
            message = notice.message
            if message.ticket and self._is_old(notice):
                self.num_renewals += 1
                notice = await subscription.renew()
                continue
            if isinstance(message, Announcement) and message.is_restart:
                arrival.restart()
            if message.ticket:
                transfer_s = self._timeouts.transfer_s
                await arrival.pull(self._puller, message.ticket, self._clock, transfer_s)
            if isinstance(message, HandoffRecord):
                return message, notice.received_s
            notice = await subscription.next()

    def _is_old(self, notice: Notice) -> bool:
        age_s = self._clock.now() - notice.received_s
        return age_s > self._timeouts.ticket_s * _OLD


def _check_record(record: HandoffRecord, num_tokens: int, arrival: Arrival) -> None:
    """Check that the record matches the leg and the announcements before it."""
    if record.num_tokens != num_tokens or len(record.token_ids) != 1:
        raise MalformedMessage(
            f"{record.request_id} was handed off with {record.num_tokens} prompt tokens and "
            f"{len(record.token_ids)} of output, not {num_tokens} and 1"
        )
    if arrival.num_announced_tokens != num_tokens:
        raise MalformedMessage(
            f"{record.request_id} was announced up to token {arrival.num_announced_tokens}, its "
            f"handoff record says {num_tokens}"
        )
