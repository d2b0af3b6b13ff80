"""Gives arriving requests a place in the batch and blocks, strictly in the policy's order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.policies.interface import DecodePolicy
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.lifecycle import Span
from pdserve.node.sessions.session import Subscription
from pdserve.shared.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Room:
    """The blocks for all known tokens and the next; the first come from its node's prefix cache."""

    block_table: list[int]
    num_reused: int  # number of blocks
    waited: Span
    num_passed: int = 0  # leading blocks without companions
    state_blocks: Sequence[int] = ()  # of its state


class RoomQueue:
    """Requests that wait for room: the engine's `claims` while they wait, then `arriving`.

    Uses the decode policy, whatever policy the engine follows: a leg that was sent to the node in a
    former role is admitted by the same rules.
    """

    def __init__(self, engine: Engine, policy: DecodePolicy) -> None:
        self._engine = engine
        self._policy = policy
        self._clock = engine.queues.clock
        self._turns: dict[Request, asyncio.Event] = {}
        self._is_offered = False
        self._subscriptions: dict[Request, Subscription] = {}  # until all of their KV is here
        engine.pool.on_release(self.offer)

    def __len__(self) -> int:
        return len(self._turns)

    def offer(self) -> None:
        """Let the first request check for room, in the next turn of the event loop."""
        if self._turns and not self._is_offered:
            self._is_offered = True
            asyncio.get_running_loop().call_soon(self._give_turn)

    async def take(self, subscription: Subscription, request: Request) -> Room:
        """Wait for the request's turn, and for blocks for all of its known tokens and the next one.

        From then on the caller owns the blocks, and a place in the batch is kept for the request,
        until it is adopted or given up with `leave`.

        Raises:
            DeadlineExceeded: the request's deadline has passed.
            PdserveError: the handoff has ended; as Subscription.wait.
        """
        since_s = self._clock.now()
        turn = self._turns[request] = asyncio.Event()
        self._subscriptions[request] = subscription
        queues = self._engine.queues
        queues.claims.append(request)
        try:
            if self._first() is request:
                turn.set()
            while (reserved := self._reserve(request, turn)) is None:
                await subscription.wait(turn)
                if not turn.is_set():  # its record has come, so that it may be the first by now
                    self.offer()
            request.block_table, num_reused = reserved
            request.num_passed = self._engine.pool.num_passed(request.num_pulled_tokens)
            request.state_blocks = self._engine.pool.allocate(self._engine.pool.state_blocks)
            queues.arriving.add(request)
            waited = (since_s, self._clock.now())
            table, states = request.block_table, request.state_blocks
            return Room(table, num_reused, waited, request.num_passed, states)
        finally:
            queues.claims.remove(request)
            del self._turns[request]
            if request not in queues.arriving:
                del self._subscriptions[request]
            self.offer()
            self._engine.wake()  # a prompt may have waited behind this request

    def arrived(self, request: Request) -> None:
        """Note that all of the request's KV has arrived; it is about to be adopted."""
        del self._subscriptions[request]

    def leave(self, request: Request) -> None:
        """Give the request up; the caller releases its blocks after this."""
        self._engine.queues.arriving.discard(request)
        del self._subscriptions[request]

    def _give_turn(self) -> None:
        self._is_offered = False
        first = self._first()
        if first in self._turns and self._has_place(first):
            self._turns[first].set()

    def _first(self) -> Request | None:
        """Return whose turn it is. All that wait are ranked for this, so it is not asked twice."""
        self._note_ended_prefills()
        return self._policy.first(self._engine.queues)

    def _has_place(self, request: Request) -> bool:
        return self._policy.has_place(self._engine.queues.beside(request), request)

    def _reserve(self, request: Request, turn: asyncio.Event) -> tuple[list[int], int] | None:
        """Return its blocks; None: it is not its turn, or there is no room. It has had its turn."""
        if not turn.is_set():
            return None
        turn.clear()
        if request.targets.deadline_s <= self._clock.now():
            raise DeadlineExceeded(f"{request.request_id} waited for room beyond its deadline")
        if not self._has_place(request):
            return None
        num_passed = self._engine.pool.num_passed(request.num_pulled_tokens)
        num_tokens = request.num_tokens + 1
        return self._engine.reserve(num_tokens, request.block_hashes, request, num_passed)

    def _note_ended_prefills(self) -> None:
        """Record the ends of remote prefills, for the policy.

        From then on a request's wait counts in its TPOT; if it has room already, it is about to
        decode.
        """
        for request, subscription in self._subscriptions.items():
            request.lifecycle.prefill_end_s = subscription.record_s
