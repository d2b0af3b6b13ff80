"""A place and blocks for requests that arrive: in the policy's order, nobody past the first one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from decode_node.policies.interface import DecodePolicy
from pdserve.clock import Clock
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.errors import DeadlineExceeded
from pdserve.lifecycle import Span
from pdserve.node.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks for the prompt and token 1; the first of them from this node's own prefix cache."""

    block_table: list[int]
    num_reused: int  # blocks
    waited: Span


class RoomQueue:
    """Those who wait for room. They are the engine's `claims` meanwhile, and `arriving` after it.

    It asks the decode policy, whatever policy the engine follows: a leg that a node was sent in a
    former role is let in by the same rules.
    """

    def __init__(self, engine: Engine, policy: DecodePolicy, clock: Clock) -> None:
        self._engine = engine
        self._policy = policy
        self._clock = clock
        self._turns: dict[Request, asyncio.Event] = {}
        self._is_offered = False
        self._subscriptions: dict[Request, Subscription] = {}  # until all of their KV is here
        engine.pool.on_release(self.offer)

    def __len__(self) -> int:
        return len(self._turns)

    def offer(self) -> None:
        """There may be room: let the first in line have a look, when the event loop comes to it."""
        if self._turns and not self._is_offered:
            self._is_offered = True
            asyncio.get_running_loop().call_soon(self._give_turn)

    async def take(self, subscription: Subscription, request: Request) -> Room:
        """Wait for one's turn, and for blocks for the prompt and token 1.

        From then on the blocks are the caller's, and the request is expected in the batch: until it
        is adopted, or given up with `leave`.

        Raises:
            DeadlineExceeded: nobody wants the answer any more.
            PdserveError: the handoff has ended; as Subscription.wait.
        """
        since_s = self._clock.now()
        turn = self._turns[request] = asyncio.Event()
        self._subscriptions[request] = subscription
        queues = self._engine.queues
        queues.claims.append(request)
        try:
            while (reserved := self._reserve(request)) is None:
                turn.clear()
                await subscription.wait(turn)
            request.block_table, num_reused = reserved
            queues.arriving.add(request)
            return Room(request.block_table, num_reused, (since_s, self._clock.now()))
        finally:
            queues.claims.remove(request)
            del self._turns[request]
            if request not in queues.arriving:
                del self._subscriptions[request]
            self.offer()
            self._engine.wake()  # a prompt may have waited behind it

    def arrived(self, request: Request) -> None:
        """All of its KV is here; it is to be adopted."""
        del self._subscriptions[request]

    def leave(self, request: Request) -> None:
        """It will not come; its blocks are released after this."""
        self._engine.queues.arriving.discard(request)
        del self._subscriptions[request]

    def _give_turn(self) -> None:
        self._is_offered = False
        self._note_ended_prefills()
        first = self._policy.first(self._engine.queues)
        if first in self._turns:
            self._turns[first].set()

    def _reserve(self, request: Request) -> tuple[list[int], int] | None:
        queues = self._engine.queues
        if request.targets.deadline_s <= self._clock.now():
            raise DeadlineExceeded(f"{request.request_id} waited for room beyond its deadline")
        self._note_ended_prefills()
        if self._policy.first(queues) is not request:
            # Ranks change with time: whoever comes first by now may not have heard of it.
            self.offer()
            self._engine.wake()
            return None
        if not self._policy.has_place(queues.beside(request), request):
            return None
        return self._engine.reserve(request.num_tokens + 1, request.block_hashes, request)

    def _note_ended_prefills(self) -> None:
        """For the policy: from then on a request's wait counts in its TPOT, and it is about to
        decode, if it has room already."""
        for request, subscription in self._subscriptions.items():
            request.lifecycle.prefill_end_s = subscription.record_s
