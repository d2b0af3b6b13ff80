"""Takes over a request from a prefill node while its prompt is still being prefilled.

    subscribe ──► host tier ──► first notice ──► grammar ──► wait for room
              ──► pull, announcement by announcement ──► handoff record ──► settle, adopt

Subscribing tells the prefill node that the blocks will be pulled, and this node is notified at once
if the handoff ends without KV to pull. During the prefill, this node's own host tier is searched
for blocks of the prompt, which then need not be pulled. The KV stays on the prefill node until the
decode policy has a place for the request and the pool has room. Tickets that have become old by
then are renewed.

The grammar, if there is one, is compiled from the start, beside the prefill. It is awaited before
room is: it may have to wait for its turn, and would keep blocks and a place in the batch from
requests that need none. If it fails, nothing is pulled.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from decode_node.announced_pulls import AnnouncedPulls
from decode_node.arrival import Arrival
from decode_node.prompt_pulls import PromptPulls
from decode_node.room import RoomQueue
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarCompiler
from pdserve.engine.request import Request
from pdserve.grammar import CompiledGrammar
from pdserve.metrics import NodeMetrics
from pdserve.node.prefixes.fetch import PrefixFetcher
from pdserve.node.prefixes.parts import Prefix
from pdserve.node.sessions.client import Session, Sessions
from pdserve.node.sessions.subscription import Subscription
from pdserve.node.translation import request_of
from pdserve.protocol import DecodeLeg, NodeAddress, PrefixSource

Compiling: TypeAlias = asyncio.Task[CompiledGrammar | None]


class Intake:
    """Brings handed-off requests into the engine."""

    def __init__(
        self,
        engine: Engine,
        room: RoomQueue,
        prefixes: PrefixFetcher,
        sessions: Sessions,
        pulls: AnnouncedPulls,
        compiler: GrammarCompiler,
        metrics: NodeMetrics,
    ) -> None:
        self._engine = engine
        self._room = room
        self._prefixes = prefixes
        self._sessions = sessions
        self._pulls = pulls
        self._compiler = compiler
        self._metrics = metrics
        self._clock = engine.queues.clock
        self._turns = PromptPulls()

    def expected(self, leg: DecodeLeg, source: NodeAddress) -> Request:
        """Make the request of a leg that has just arrived, without KV or token 1 yet."""
        sources = [PrefixSource(node=source, num_tokens=len(leg.token_ids))]
        request = request_of(leg, self._clock.now(), sources)
        request.extend_hashes(request.num_tokens, self._engine.pool.block_size)
        return request

    async def take(self, request: Request, prompt_id: str, source: NodeAddress) -> None:
        """Pull the request's KV from `source` and hand it to the engine.

        However this ends, no block is leaked or written to later: `Puller.pull` does not return or
        raise while anything may still write to its destination.

        Raises:
            PdserveError: the exporter is lost, the handoff ended, a pull or the grammar failed.
        """
        if not request.sampling.grammar:
            await self._take(request, prompt_id, source)
            return
        compiling = asyncio.create_task(self._compiler.compiled(request.sampling.grammar))
        try:
            await self._take(request, prompt_id, source, compiling)
        finally:
            compiling.cancel()
            await asyncio.gather(compiling, return_exceptions=True)  # it does not outlive this

    async def _take(
        self,
        request: Request,
        prompt_id: str,
        source: NodeAddress,
        compiling: Compiling | None = None,
    ) -> None:
        session = await self._sessions.get(source)
        async with (
            session.subscribed(request.request_id, at_end=prompt_id in self._turns) as subscription,
            self._turns.turn(prompt_id, subscription),
        ):
            await self._receive(request, session, subscription, compiling)
            subscription.was_pulled = True
            request.lifecycle.adopted_s = self._clock.now()
            self._engine.adopt(request)

    async def _receive(
        self,
        request: Request,
        session: Session,
        subscription: Subscription,
        compiling: Compiling | None,
    ) -> None:
        """Receive the grammar, then the prompt's KV into blocks of this node, token 1 with it."""
        prefix = Prefix(request.prompt_token_ids, request.cache_salt, request.block_hashes)
        await self._prefixes.fetch(prefix, ())  # only from the host tier
        first = await subscription.next()
        if compiling is not None:
            request.grammar = await subscription.result_of(compiling)
        room = await self._room.take(subscription, request)
        arrival = Arrival(
            request.request_id, request.num_prompt_tokens, room, session, self._engine.pool
        )
        try:
            handoff = await self._pulls.receive(first, subscription, session, arrival)
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
        record = handoff.record
        request.output_token_ids = list(record.token_ids)
        request.num_computed_tokens = record.num_tokens
        request.num_cached_tokens = record.cached_tokens
