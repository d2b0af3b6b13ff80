"""A puller's subscription to the handoff of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pdserve.protocol import Announcement, HandoffRecord, Renew, TakeOver
from pdserve.shared.errors import PdserveError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Notice:
    """A message of the exporter about a request, and when it arrived."""

    message: Announcement | HandoffRecord
    received_s: float


class Subscription:
    """The messages about one request that have not been read yet.

    Every wait here ends when the handoff ends, with the reason that the exporter gives, or when the
    session breaks.
    """

    def __init__(self, subscription_id: str, send: Callable[[msgspec.Struct], None]) -> None:
        self.was_pulled = False  # told to the exporter at the end
        self.record_s: float | None = None  # when the handoff record arrived
        self._id = subscription_id
        self._send = send
        self._recorded = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: PdserveError | None = None
        self._notices: asyncio.Queue[Notice | None] = asyncio.Queue()  # None: see `_failure`

    # ---- called by the session -----------------------------------------------------------------

    def put(self, notice: Notice) -> None:
        """Add a message of the exporter."""
        if isinstance(notice.message, HandoffRecord) and self.record_s is None:
            self.record_s = notice.received_s
            self._recorded.set()
        self._notices.put_nowait(notice)

    def fail(self, error: PdserveError) -> None:
        """End the subscription, for this reason."""
        self._failure = error
        self._failed.set()
        self._notices.put_nowait(None)

    # ---- called by the puller ------------------------------------------------------------------

    async def next(self) -> Notice:
        """The next notice. They cover the request from its first block to the handoff record.

        Raises:
            PeerLost: the exporter is gone.
            PdserveError: the handoff ended, for the reason that the exporter gives.
        """
        notice = await self._notices.get()
        if notice is None:
            self._raise_failure()
            raise AssertionError("a subscription ends with a failure")
        return notice

    async def renew(self) -> Notice:
        """Have everything announced again with fresh tickets; returns the first new notice.

        Raises:
            PdserveError: as next.
        """
        self._send(Renew(subscription_id=self._id))
        while True:
            notice = await self.next()
            if isinstance(notice.message, Announcement) and notice.message.is_restart:
                return notice

    def take_over(self) -> None:
        """Have the stream end there, so that it can go on here; see TakeOver."""
        self._send(TakeOver(subscription_id=self._id))

    async def wait(self, event: asyncio.Event) -> None:
        """Wait for `event` or for the handoff record, whichever is first, or for a failure.

        Raises:
            PdserveError: as next.
        """
        events = [event, self._failed]
        if self.record_s is None:
            events.append(self._recorded)
        waits = {asyncio.create_task(event.wait()) for event in events}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        self._raise_failure()

    async def result_of(self, task: asyncio.Task[T]) -> T:
        """Wait for a task; the caller ends it if this raises.

        Raises:
            PdserveError: as next.
            Exception: what the task failed with; a copy, since the task has the original, and a
                traceback with this task in it would make that a cycle.
        """
        if not task.done():
            failed = asyncio.create_task(self._failed.wait())
            try:
                await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                failed.cancel()
        self._raise_failure()
        error = task.exception()
        if error is not None:
            raise copy(error) from error
        return task.result()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise copy(self._failure)  # the traceback of the original would refer to itself
