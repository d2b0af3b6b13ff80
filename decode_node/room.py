"""Blocks for requests that arrive: first come, first served, and nobody goes past who waits."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.engine.engine import Engine
from pdserve.lifecycle import Span
from pdserve.node.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks for the prompt and token 1; the first of them from this node's own prefix cache."""

    block_table: list[int]
    num_reused: int  # blocks
    waited: Span


class RoomQueue:
    """Those who wait for room, in order of arrival."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._waiting: deque[asyncio.Event] = deque()
        engine.pool.on_release(self.offer)

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self) -> None:
        """There may be room: let the first in line have a look."""
        if self._waiting:
            self._waiting[0].set()

    async def take(self, subscription: Subscription, num_tokens: int, hashes: list[bytes]) -> Room:
        """Wait for one's turn and for blocks, which are the caller's from then on.

        Raises:
            PdserveError: the handoff has ended; as Subscription.wait.
        """
        since_s = self._clock.now()
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while True:
                if self._waiting[0] is turn:
                    reserved = self._engine.reserve(num_tokens, hashes)
                    if reserved is not None:
                        block_table, num_reused = reserved
                        return Room(block_table, num_reused, (since_s, self._clock.now()))
                turn.clear()
                await subscription.wait(turn)
        finally:
            self._waiting.remove(turn)
            self.offer()
