"""GET /admin/live: the state of the cluster as a stream of events, for the page.

The first event has everything that is kept, the others, one a second, what is new. They are made
once for all who watch, and not at all while nobody does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from coordinator.api.answer.sse import framed
from coordinator.api.context import ApiContext
from coordinator.page.history import GROWTH, PERIOD_S, History
from coordinator.page.told import News, Period
from pdserve import __version__
from pdserve.findings.checks import findings, worst_first
from pdserve.findings.finding import Level
from pdserve.protocol.status import ClusterStatus, RoleName
from pdserve.shared.errors import Overloaded

NEWS_S: Final = 1.0
MOST_VIEWERS: Final = 32
_MOST_JOURNEYS: Final = 20  # newest, in one event
_MOST_UNREAD: Final = 8  # events; a client that reads nothing ends sooner, by its stall time-out


class Live:
    """Keeps the history, and tells those who watch."""

    def __init__(
        self,
        status: Callable[[], ClusterStatus],
        kv_used: Callable[[], Mapping[RoleName, float]],
        history: History,
        news_s: float = NEWS_S,
        num_per_period: int = round(PERIOD_S / NEWS_S),
    ) -> None:
        """There is news every `news_s`, and a period ends with each `num_per_period`-th.

        `kv_used` returns the share of the KV blocks of each pool.
        """
        self._status = status
        self._kv_used = kv_used
        self._history = history
        self._news_s = news_s
        self._num_per_period = num_per_period
        self._viewers: set[asyncio.Queue[bytes]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the time meanwhile."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()

    async def watch(self, context: ApiContext) -> AsyncGenerator[bytes]:
        """GET /admin/live: tell the client everything, and then the news until it leaves.

        One that reads too slowly is left: when it comes back, it gets everything anew.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} pages watch this coordinator already: close one")
        news: asyncio.Queue[bytes] = asyncio.Queue()
        self._viewers.add(news)
        try:
            yield self._everything()
            while not context.tasks.is_draining and news.qsize() < _MOST_UNREAD:
                yield await news.get()
        finally:
            self._viewers.discard(news)

    async def _run(self) -> None:
        """Driven by time: what it tells are states, and rates."""
        num_ticks, num_told = 0, self._history.num_journeys
        while True:
            await asyncio.sleep(self._news_s)
            num_ticks += 1
            is_over = num_ticks % self._num_per_period == 0
            if is_over:
                self._history.end_period(self._kv_used())
            if self._viewers:
                self._tell(
                    self._news(list(self._history.periods)[-1:] if is_over else [], num_told)
                )
            num_told = self._history.num_journeys

    def _tell(self, event: bytes) -> None:
        for news in self._viewers:
            news.put_nowait(event)

    def _everything(self) -> bytes:
        return self._news(list(self._history.periods), 0, most_journeys=None)

    def _news(
        self, periods: list[Period], num_told: int, most_journeys: int | None = _MOST_JOURNEYS
    ) -> bytes:
        status = self._status()
        journeys = self._history.journeys_since(num_told)
        news = News(
            version=__version__,
            status=status,
            findings=[
                found
                for found in worst_first(findings(status, time.time()))
                if found.level is not Level.OK
            ],
            growth=GROWTH,
            periods=periods,
            current=self._history.current(self._kv_used()),
            journeys=journeys if most_journeys is None else journeys[-most_journeys:],
        )
        return framed(msgspec.json.encode(news))
