"""Streams the events of a background response, starting at any event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from coordinator.api.answer.sse import SseStream
from coordinator.api.calls import question
from coordinator.api.context import CONTEXT, TRACE, ApiContext
from coordinator.api.read.ask import Question
from coordinator.api.server.outbox import PIECE_BYTES
from coordinator.stateful.storage.store import STORE, ResponseStore
from coordinator.stateful.storage.stored import EventLog


@dataclass(frozen=True, slots=True)
class Events:
    """An answer: the events of a response, from number `first` on."""

    log: EventLog
    first: int


def told_or_followed(
    say: Callable[[ResponseStore, Question], Awaitable[web.Response | Events]],
) -> Handler:
    """Return the handler of a question that may be answered with events."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await say(request.app[STORE], question(request))
        if isinstance(answer, Events):
            return await follow(request, answer.log, answer.first)
        return answer

    return handle


async def follow(request: web.Request, log: EventLog, first: int) -> web.StreamResponse:
    """Stream all events from number `first` on, including future ones, until the log is closed."""
    context = request.app[CONTEXT]
    stream = SseStream(request[TRACE].way_out)
    await stream.open(request, {})
    follower = _Follower(context, log, stream, first)
    try:
        await follower.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not context.tasks.is_aborting or task is None:
            raise
        task.uncancel()  # the background run is aborted, too, and logs its last event
        await follower.run()
    await stream.close()
    return stream.response


class _Follower:
    def __init__(
        self, context: ApiContext, log: EventLog, stream: SseStream, num_sent: int
    ) -> None:
        self._context = context
        self._log = log
        self._stream = stream
        self._num_sent = num_sent

    async def run(self) -> None:
        """Send events until the log is closed and all of it is sent; may be called again."""
        clock, log = self._context.clock, self._log
        keep_alive_s = self._context.config.keep_alive_s
        sent_s = clock.now()
        while True:
            if events := self._next_events():
                self._num_sent += len(events)
                await self._stream.send(events)
                sent_s = clock.now()
            elif log.is_closed:
                return
            elif clock.now() >= sent_s + keep_alive_s:
                await self._stream.keep_alive()
                sent_s = clock.now()
            else:
                await log.changed(sent_s + keep_alive_s - clock.now())

    def _next_events(self) -> list[bytes]:
        """Return events to be sent at once: one at least, and no more than are a page."""
        events, num_bytes = self._log.events, 0
        for end in range(self._num_sent, len(events)):
            num_bytes += len(events[end])
            if num_bytes > PIECE_BYTES and end > self._num_sent:
                return events[self._num_sent : end]
        return events[self._num_sent :]
