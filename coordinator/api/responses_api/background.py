"""A response that is made without its client: `background: true`.

Its call outlives the HTTP request that began it: it is charged and observed when it ends, and ends
by itself, at its deadline, when it is cancelled or deleted, or when the store has no room for it.
Polls read what is stored of it, streams its log; both may come and go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from coordinator.api.answer import new_events
from coordinator.api.call import Call
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.endpoint import CLIENT_GONE, conclude
from coordinator.api.errors import describe
from coordinator.api.responses_api.plan import Planned
from pdserve.errors import NodeDraining

_log = logging.getLogger(__name__)


class BackgroundRun:
    """One of them.

    Args:
        trace: of the call.
        planned: what is stored of it is kept up to date.
        take_over: called when the call has begun, which is the run's to conclude from then on.
    """

    def __init__(
        self,
        context: ApiContext,
        trace: RequestTrace,
        planned: Planned,
        take_over: Callable[[], None],
    ) -> None:
        self._context = context
        self._trace = trace
        self._plan = planned.call
        self._format = planned.format
        self._stored = planned.stored
        self._take_over = take_over
        self._has_begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def begin(self) -> bytes:
        """Have it made; returns the response as it was put into the store, still queued.

        Raises what refuses the call.
        """
        self._stored.making = self._context.in_flight.start(self._make())
        return await asyncio.shield(self._has_begun)

    async def _make(self) -> None:
        """The top-level handler of what has no HTTP request any more."""
        try:
            async with Call(self._context, self._trace, self._plan) as call:
                self._take_over()
                self._tell(self._format.queued(), is_step=True)
                self._context.stored.put(self._stored)
                self._has_begun.set_result(self._stored.body)
                await self._follow(call)
            self._end(200, None)
        except asyncio.CancelledError:
            if self._context.in_flight.is_aborting:
                self._fail(NodeDraining("the coordinator is shutting down"))
            else:
                self._tell([self._format.cancelled()], is_step=True)
                self._end(CLIENT_GONE, "cancelled")
        except Exception as error:  # noqa: BLE001  whatever it is, whoever waits is told
            if self._has_begun.done():
                self._fail(error)
            else:
                self._has_begun.set_exception(error)

    async def _follow(self, call: Call) -> None:
        is_first = True
        while not call.is_finished:
            await call.wait()
            events = await new_events(call, self._plan, is_first=is_first)
            self._tell(events, is_step=is_first)
            is_first = False

    def _fail(self, error: Exception) -> None:
        trace = self._trace
        reply = describe(error, trace.request_id, self._context.config.retry_after_s)
        if reply.status == 500:
            _log.error("request %s failed in the background", trace.request_id, exc_info=error)
        self._tell([self._format.failure(reply.detail)], is_step=True)
        self._end(reply.status, reply.detail.code)

    def _tell(self, events: Sequence[bytes], *, is_step: bool) -> None:
        """A step of its life changes what polls see; what is between two is for streams alone."""
        stored = self._stored
        if stored.log is not None:
            stored.log.add(events)
        if is_step and not stored.is_answer:
            stored.body = self._format.body()
        self._context.stored.changed(stored)

    def _end(self, status: int, code: str | None) -> None:
        if self._stored.log is not None:
            self._stored.log.close()
        conclude(self._context, self._trace, status, code)
