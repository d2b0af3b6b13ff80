"""Takes in a request from a prefill node while its prompt is still being prefilled.

    subscribe ──► first notice ──► prepared ──► wait for room
              ──► pull, announcement by announcement ──► handoff record ──► settle, adopt

Subscribing tells the prefill node that the blocks will be pulled, and this node is notified at once
if the handoff ends without KV to pull. The KV stays on the prefill node until the decode policy has
a place for the request and the pool has room. Tickets that have become old by then are renewed.

A stream that another node still decodes is taken over in the same way: its complete blocks are
pulled while it goes on there, then it ends there, and the rest comes with its record. Nothing is
left to compute here but its next token.

Beside the prefill, the request is prepared (`pdserve.node.preparation`): its grammar is compiled,
and this node's own host tier is searched for blocks of the prompt, which then need not be pulled.
That is awaited before room is: a grammar may have to wait for its turn, and would keep blocks and a
place in the batch from requests that need none. If it fails, nothing is pulled.

Of several answers to one prompt, the first pulls its KV. The others wait, and then find all full
blocks in the prefix cache. They pull only the last block, each into a block of its own, since each
of them writes further KV there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from decode_node.arrival import AnnouncedPulls, Arrival
from decode_node.room import RoomQueue
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.engine.steps.tapped import Tapped
from pdserve.metrics import NodeMetrics
from pdserve.node.legs import KeptScores, request_of
from pdserve.node.prefixes.offers import Fetched, Prefix
from pdserve.node.preparation import Preparation
from pdserve.node.sessions.session import Session, Subscription
from pdserve.protocol import DecodeLeg, HandoffRecord, NodeAddress, PrefixSource
from pdserve.shared.errors import MalformedMessage


@dataclass(slots=True)
class _Pull:
    """The first pull of a prompt."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    was_adopted: bool = False


class PromptPulls:
    """The prompts whose KV is being pulled."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}  # by prompt id

    def __contains__(self, prompt_id: str) -> bool:
        """Whether the prompt is being pulled already; other requests then wait for its end."""
        return prompt_id in self._pulls

    @asynccontextmanager
    async def turn(self, prompt_id: str, subscription: Subscription) -> AsyncIterator[None]:
        """Enter as the first request of the prompt, or once the first one has been adopted.

        If the first request fails, another one becomes the first. No request waits beyond the end
        of its handoff.

        Raises:
            PdserveError: the handoff has ended; as Subscription.wait.
        """
        while (pull := self._pulls.get(prompt_id)) is not None:
            await subscription.wait(pull.is_over)
            if pull.was_adopted:
                yield
                return
        pull = self._pulls[prompt_id] = _Pull()
        try:
            yield
            pull.was_adopted = True
        finally:
            del self._pulls[prompt_id]
            pull.is_over.set()


class OpensSessions(Protocol):
    """Where sessions come from (`sessions.client.Sessions`)."""

    async def get(self, peer: NodeAddress) -> Session:
        """The session with this incarnation of a node, opened if necessary. Raises PdserveError."""
        ...


class Intake:
    """Brings handed-off requests into the engine."""

    def __init__(
        self,
        engine: Engine,
        room: RoomQueue,
        preparation: Preparation,
        sessions: OpensSessions,
        pulls: AnnouncedPulls,
        metrics: NodeMetrics,
        scores: KeptScores,
        *,
        is_by_role: bool = False,
    ) -> None:
        """`is_by_role`: prefill nodes and decode nodes have weights of their own."""
        self._is_by_role = is_by_role
        self._engine = engine
        self._room = room
        self._preparation = preparation
        self._sessions = sessions
        self._pulls = pulls
        self._metrics = metrics
        self._scores = scores
        self._clock = engine.queues.clock
        self._turns = PromptPulls()

    def expected(self, leg: DecodeLeg, source: NodeAddress) -> Request:
        """Make the request of a leg that has just arrived, without KV or token 1 yet."""
        sources = [PrefixSource(node=source, num_tokens=leg.prompt.num_tokens)]
        request = request_of(leg, self._clock.now(), sources)
        prompt_only = request.num_prompt_tokens
        request.num_pulled_tokens = request.num_tokens if leg.takes_over else prompt_only
        if self._is_by_role:
            request.num_by_prefill = prompt_only  # until its record says so
        request.extend_hashes(request.num_pulled_tokens, self._engine.pool.block_size)
        return request

    async def take(
        self, request: Request, prompt_id: str, source: NodeAddress, takes_over: str = ""
    ) -> None:
        """Pull the request's KV from `source` and hand it to the engine.

        `takes_over` is the leg at the source whose stream is taken over; empty: it is a prefill.

        However this ends, no block is leaked or written to later: `Puller.pull` does not return or
        raise while anything may still write to its destination.

        Raises:
            PdserveError: the exporter is lost, the handoff ended, a pull or the grammar failed.
        """
        prefix = Prefix(request.prompt, request.block_hashes)
        async with self._preparation.beside(request, prefix) as preparing:
            session = await self._sessions.get(source)
            is_follower = prompt_id in self._turns
            async with (
                session.subscribed(
                    takes_over or request.request_id,
                    at_end=is_follower,
                    num_emitted=request.num_emitted_before if takes_over else 0,
                    taker=request.request_id if takes_over else "",
                ) as subscription,
                self._turns.turn(prompt_id, subscription),
            ):
                await self._receive(request, session, subscription, preparing)
                subscription.was_pulled = True
                request.lifecycle.adopted_s = self._clock.now()
                self._engine.adopt(request)

    async def _receive(
        self,
        request: Request,
        session: Session,
        subscription: Subscription,
        preparing: asyncio.Task[Fetched] | None,
    ) -> None:
        """Receive the KV into blocks here, and token 1 or a stream's newest tokens with it."""
        first = await subscription.next()
        if preparing is not None:
            await subscription.result_of(preparing)
        room = await self._room.take(subscription, request)
        num_pulled, num_emitted = request.num_pulled_tokens, request.num_emitted_before
        is_stream = num_pulled > request.num_prompt_tokens
        most = request.num_prompt_tokens + request.sampling.max_tokens if is_stream else None
        arrival = Arrival(request.request_id, num_pulled, room, session, self._engine.pool, most)
        try:
            handoff = await self._pulls.receive(first, subscription, session, arrival)
            record = handoff.record
            _check_adapter(record, request)
            _check_weights(record, request)
            if record.head is not None:
                request.tapped = Tapped.of(record.head, record.num_tokens - 1)
        except BaseException:
            self._room.leave(request)
            arrival.release()
            raise
        arrival.adopt()
        self._room.arrived(request)
        start_s, end_s = room.waited
        self._metrics.room_wait.observe(end_s - start_s)
        request.lifecycle.prefill_end_s = handoff.prefill_end_s
        request.lifecycle.room_wait = room.waited
        request.lifecycle.copies = arrival.copies
        request.lifecycle.record = handoff.times
        request.num_by_prefill = record.num_by_prefill
        if is_stream or not num_emitted:  # else token 1 is known, and what followed it
            request.output_token_ids += record.token_ids
            self._scores.add(request.request_id, num_emitted, record.logprobs)
        request.num_computed_tokens = record.num_tokens
        request.num_cached_tokens = record.cached_tokens


def _check_adapter(record: HandoffRecord, request: Request) -> None:
    """Raise MalformedMessage if another adapter has computed the KV than goes on with it."""
    if record.adapter != request.prompt.adapter:
        raise MalformedMessage(
            f"{request.request_id} is for {request.prompt.adapter or 'no adapter'}, but its KV was "
            f"computed with {record.adapter or 'none'}"
        )


def _check_weights(record: HandoffRecord, request: Request) -> None:
    """Raise MalformedMessage if it does not say which weights have made which KV, or says more."""
    by_prefill, is_by_role = record.num_by_prefill, request.num_by_prefill is not None
    if is_by_role != (by_prefill is not None) or not 0 <= (by_prefill or 0) <= record.num_tokens:
        raise MalformedMessage(
            f"{request.request_id}: weights of prefill nodes have made {by_prefill} of the first "
            f"{record.num_tokens} tokens, says its record, and here roles have "
            f"{'weights of their own' if is_by_role else 'the same weights'}"
        )
