"""Turns at what serves few callers at a time; each tenant gets its, however many callers it has."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A semaphore with a queue for each tenant; the queues are served round robin."""

    def __init__(self, num_places: int = 1) -> None:
        self._num_free = num_places
        # Tenant |-> its waiting callers; the tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of this tenant's, and have it while in the context."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.pass_on()

    async def take(self, tenant: str) -> None:
        """Wait for a turn of this tenant's. It ends with `pass_on`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had just come
                self.pass_on()
            raise

    def try_take(self) -> bool:
        """Take a turn if one is free."""
        is_free = self._num_free > 0
        self._num_free -= is_free
        return is_free

    def pass_on(self) -> None:
        """End a turn: it goes to the next caller who still waits."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            while queue:
                turn = queue.popleft()
                if turn.cancelled():
                    continue
                turn.set_result(None)
                if queue:
                    self._waiting[tenant] = queue  # at the end
                return
        self._num_free += 1
