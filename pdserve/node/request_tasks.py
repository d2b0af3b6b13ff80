"""What requests wait for before they reach the engine: a task for each, followed up at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from pdserve.engine.request import Request
from pdserve.errors import PdserveError

log = logging.getLogger(__name__)

T = TypeVar("T")
FollowUp: TypeAlias = Callable[[Request, T | BaseException], None]  # the result, or the failure


class RequestTasks(Generic[T]):
    """The requests that wait, and their tasks. A request that is given up has no follow-up."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Task[T]] = {}  # request_id |-> its task
        self._requests: dict[asyncio.Task[T], Request] = {}  # with those that were given up

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """The requests that wait."""
        return [self._requests[task] for task in self._waiting.values()]

    def start(self, request: Request, work: Coroutine[Any, Any, T], follow_up: FollowUp[T]) -> None:
        """Begin `work` for a request, and call `follow_up` with its outcome when it is done."""
        task = asyncio.create_task(work)
        self._waiting[request.request_id] = task
        self._requests[task] = request
        task.add_done_callback(partial(self._ended, follow_up))

    def cancel(self, request_id: str) -> None:
        """Give up a request, even if its task has just ended. Unknown ids are ignored."""
        task = self._waiting.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up all requests, and wait until every task has ended."""
        for request_id in list(self._waiting):
            self.cancel(request_id)
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _ended(self, follow_up: FollowUp[T], task: asyncio.Task[T]) -> None:
        request = self._requests.pop(task)
        request_id = request.request_id
        is_awaited = self._waiting.get(request_id) is task  # the id may have come again
        if is_awaited:
            del self._waiting[request_id]
        if is_awaited:
            follow_up(request, _outcome_of(task))
        elif not task.cancelled():
            # This retrieves the exception: asyncio complains about those that nobody asks for.
            log.debug("%s was given up before its task ended: %r", request_id, task.exception())


def _outcome_of(task: asyncio.Task[T]) -> T | BaseException:
    if task.cancelled():  # not by `cancel`: then nobody would ask
        return PdserveError("what the request waited for was cancelled; send it again")
    return task.exception() or task.result()
