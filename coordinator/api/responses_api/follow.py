"""The stream of a response that is made in the background, from any event on."""

from __future__ import annotations

import asyncio

from aiohttp import web

from coordinator.api.context import CONTEXT, ApiContext
from coordinator.api.responses_api.stored import EventLog
from coordinator.api.sse import SseStream


async def follow(request: web.Request, log: EventLog, first: int) -> web.StreamResponse:
    """All events from that number on, those that are yet to come as well."""
    context = request.app[CONTEXT]
    stream = SseStream(request, context.config.stall_timeout_s)
    await stream.open(request, {})
    follower = _Follower(context, log, stream, first)
    try:
        await follower.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not context.in_flight.is_aborting or task is None:
            raise
        task.uncancel()  # what makes the response is being ended too: it says so in the log
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
        """Until the log is closed and all of it is sent; may be called again."""
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
