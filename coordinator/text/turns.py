"""Turns at what serves one caller at a time; tenants take turns, however many callers they have."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock with a queue for each tenant; the queues are served round robin."""

    def __init__(self) -> None:
        self._is_taken = False
        # Tenant |-> its waiting callers; the tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of this tenant's, and have it while in the context."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, tenant: str) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had just come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next caller who still waits."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            callers = deque(turn for turn in queue if not turn.cancelled())
            if callers:
                callers.popleft().set_result(None)
                if callers:
                    self._waiting[tenant] = callers  # at the end
                return
        self._is_taken = False
