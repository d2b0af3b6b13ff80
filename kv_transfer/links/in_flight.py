"""The pulls of one link that are in flight: each has a deadline, and closing the link ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from pdserve.shared.errors import TransferCancelled, TransferError, TransferTimeout


class PullsInFlight:
    """Belongs to one link."""

    def __init__(self, peer: str, transport: Callable[[], str]) -> None:
        """Args, for messages: the exporter, and the name of the transport in use."""
        self.peer = peer
        self.transport = transport
        self.is_closed = False
        self._pulls: set[Pulling] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def add(self, pull: Pulling) -> None:
        """A pull begins."""
        self._pulls.add(pull)
        self._none_left.clear()

    def remove(self, pull: Pulling) -> None:
        """A pull ends."""
        self._pulls.remove(pull)
        if not self._pulls:
            self._none_left.set()

    async def close(self) -> None:
        """Let no pull begin any more, and end those in flight; returns when they have ended."""
        self.is_closed = True
        for pull in self._pulls:
            pull.end()
        await self._none_left.wait()


class Pulling:
    """The context of one pull: limits its time, and ends it when the link is closed.

    It does what asyncio.timeout does, but a small pull takes no longer than two of those.

    Raises:
        TransferTimeout: the body took longer than `timeout_s`.
        TransferCancelled: the link was closed before or during the body.
    """

    __slots__ = ("_cancelling", "_has_ended", "_pulls", "_task", "_timeout_s", "_timer")

    _task: asyncio.Task[object]
    _timer: asyncio.TimerHandle
    _cancelling: int  # requests to cancel the task before this context was entered

    def __init__(self, pulls: PullsInFlight, timeout_s: float) -> None:
        self._pulls = pulls
        self._timeout_s = timeout_s
        self._has_ended = False

    def end(self) -> None:
        """End the body, by cancelling its task. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._task.cancel()

    async def __aenter__(self) -> None:
        if self._pulls.is_closed:
            raise TransferCancelled(f"the link to {self._pulls.peer!r} is closed")
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self.end)
        self._pulls.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._pulls.remove(self)
        is_ours = self._has_ended and self._task.uncancel() <= self._cancelling
        # A TimeoutError is one of a system call.
        if (is_ours and kind is asyncio.CancelledError) or isinstance(error, TimeoutError):
            raise self._reason() from error

    def _reason(self) -> TransferError:
        pulls = self._pulls
        if pulls.is_closed:
            return TransferCancelled(f"the link to {pulls.peer!r} was closed during the pull")
        return TransferTimeout(
            f"the pull from {pulls.peer!r} over {pulls.transport()} took longer than "
            f"{self._timeout_s} s"
        )
