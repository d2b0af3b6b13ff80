"""Streams the events of a background response, starting at any event."""

from __future__ import annotations

import asyncio

from aiohttp import web

from coordinator.api.answer.sse import SseStream
from coordinator.api.context import CONTEXT, ApiContext
from coordinator.stateful.storage.stored import EventLog


async def follow(request: web.Request, log: EventLog, first: int) -> web.StreamResponse:
    """Stream all events from number `first` on, including future ones, until the log is closed."""
    context = request.app[CONTEXT]
    stream = SseStream(request, context.config.stall_timeout_s)
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
            if events := log.events[self._num_sent :]:
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
