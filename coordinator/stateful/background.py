"""Generates a response independently of its client's connection: `background: true`.

The call outlives the HTTP request that began it. It is charged and observed when it ends: by
itself, at its deadline, when it is cancelled or deleted, or when the store evicts it. Polling
clients read the stored response, streaming clients its event log; both may connect at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from coordinator.api.answer.call import Call
from coordinator.api.answer.run import send_new
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.server.callers import CLIENT_GONE, conclude
from coordinator.api.server.errors import describe
from coordinator.stateful.plan import Planned
from coordinator.stateful.storage.store import ResponseStore
from pdserve.shared.errors import NodeDraining

_log = logging.getLogger(__name__)


class BackgroundRun:
    """One response generated in the background.

    Args:
        trace: the trace of the call.
        planned: the plan; its stored response is kept up to date.
        take_over: called once the call has begun; from then on the run concludes the call.
    """

    def __init__(
        self,
        context: ApiContext,
        store: ResponseStore,
        trace: RequestTrace,
        planned: Planned,
        take_over: Callable[[], None],
    ) -> None:
        self._context = context
        self._store = store
        self._trace = trace
        self._plan = planned.call
        self._format = planned.format
        self._stored = planned.stored
        self._take_over = take_over

    def begin(self) -> bytes:
        """Start the call; return the stored response as JSON, with status "queued".

        Raises the error with which the call is refused.
        """
        call = Call(self._context, self._trace, self._plan)
        call.start()
        self._take_over()
        self._tell(self._format.queued(), is_step=True)
        self._stored.making = self._context.tasks.start(self._follow(call))
        # A done callback also runs for a task that is cancelled before its first step.
        self._stored.making.add_done_callback(partial(self._over, call))
        self._store.put(self._stored)
        return self._stored.body

    async def _follow(self, call: Call) -> None:
        is_first = True

        async def tell(events: Sequence[bytes]) -> None:
            self._tell(events, is_step=is_first)

        while not call.is_finished:
            await call.wait()
            await send_new(call, self._plan, tell, is_first=is_first)
            is_first = False

    def _over(self, call: Call, making: asyncio.Task[None]) -> None:
        """Finish the run: the top-level handler, as there is no HTTP request any more."""
        error = asyncio.CancelledError() if making.cancelled() else making.exception()
        call.close(error)
        if error is None:
            self._stored.order = None
            self._end(200, None)
        elif not making.cancelled():
            self._fail(error)
        elif self._context.tasks.is_aborting and self._store.is_durable:
            self._end(503, NodeDraining.code)  # the next coordinator begins it again
        elif self._context.tasks.is_aborting:
            self._fail(NodeDraining("the coordinator is shutting down"))
        else:
            self._stored.order = None
            self._tell([self._format.cancelled()], is_step=True)
            self._end(CLIENT_GONE, "cancelled")

    def _fail(self, error: BaseException) -> None:
        trace = self._trace
        reply = describe(error, trace.request_id, self._context.config.retry_after_s)
        if reply.status == 500:
            _log.error("request %s failed in the background", trace.request_id, exc_info=error)
        self._stored.order = None
        self._tell([self._format.failure(reply.detail)], is_step=True)
        self._end(reply.status, reply.detail.code)

    def _tell(self, events: Sequence[bytes], *, is_step: bool) -> None:
        """Append events to the log; a change of status also updates the body that polls read."""
        stored = self._stored
        if stored.log is not None:
            stored.log.add(events)
        if not is_step:
            self._store.logged(stored)
            return
        if not stored.is_answer:
            stored.body = self._format.body()
        self._store.changed(stored)

    def _end(self, status: int, code: str | None) -> None:
        if self._stored.log is not None:
            self._stored.log.close()
        self._store.logged(self._stored)
        conclude(self._context, self._trace, status, code)
