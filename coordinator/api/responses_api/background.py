"""A response that is made without its client: `background: true`.

Its call outlives the HTTP request that began it: it is charged and observed when it ends, and ends
by itself, at its deadline, when it is cancelled or deleted, or when the store has no room for it.
Polls read what is stored of it, streams its log; both may come and go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

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

    def begin(self) -> bytes:
        """Have it made; returns the response as it was put into the store, still queued.

        Raises what refuses the call.
        """
        call = Call(self._context, self._trace, self._plan)
        call.start()
        self._take_over()
        self._tell(self._format.queued(), is_step=True)
        self._stored.making = self._context.in_flight.start(self._follow(call))
        # A task that is cancelled before its first step does nothing: this is called all the same.
        self._stored.making.add_done_callback(partial(self._over, call))
        self._context.stored.put(self._stored)
        return self._stored.body

    async def _follow(self, call: Call) -> None:
        is_first = True
        while not call.is_finished:
            await call.wait()
            events = await new_events(call, self._plan, is_first=is_first)
            self._tell(events, is_step=is_first)
            is_first = False

    def _over(self, call: Call, making: asyncio.Task[None]) -> None:
        """The top-level handler of what has no HTTP request any more."""
        error = asyncio.CancelledError() if making.cancelled() else making.exception()
        call.close(error)
        if error is None:
            self._end(200, None)
        elif not making.cancelled():
            self._fail(error)
        elif self._context.in_flight.is_aborting:
            self._fail(NodeDraining("the coordinator is shutting down"))
        else:
            self._tell([self._format.cancelled()], is_step=True)
            self._end(CLIENT_GONE, "cancelled")

    def _fail(self, error: BaseException) -> None:
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
