"""The pulls of one link that are in flight: each has a deadline, and closing the link ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from pdserve.shared.errors import TransferCancelled, TransferError, TransferTimeout

_TICK_S = 0.001  # timers of event loops are this much early, at most


class PullsInFlight:
    """Belongs to one link.

    One timer serves all pulls: most end long before their deadlines, and a timer of its own would
    take a small pull as long as its bytes.
    """

    def __init__(self, peer: str, transport: Callable[[], str]) -> None:
        """Args, for messages: the exporter, and the name of the transport in use."""
        self.peer = peer
        self.transport = transport
        self.is_closed = False
        self._pulls: set[Pulling] = set()
        self._none_left: asyncio.Event | None = None  # of who closes them
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it is due, on the loop's clock

    def add(self, pull: Pulling) -> None:
        """A pull begins."""
        self._pulls.add(pull)
        if self._timer is None or pull.deadline_s < self._timer_s:
            self._wake_at(pull.deadline_s)

    def remove(self, pull: Pulling) -> None:
        """A pull ends."""
        self._pulls.remove(pull)
        if self._none_left is not None and not self._pulls:
            self._none_left.set()

    async def close(self) -> None:
        """Let no pull begin any more, and end those in flight; returns when they have ended."""
        self.is_closed = True
        if self._none_left is None:
            self._none_left = asyncio.Event()
        for pull in self._pulls:
            pull.end()
        if self._pulls:
            await self._none_left.wait()
        self._stop_timer()

    def _wake_at(self, due_s: float) -> None:
        self._stop_timer()
        self._timer_s = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._end_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        """End the pulls whose deadline has come, and wait for that of the next one, if any."""
        self._timer = None
        now_s = asyncio.get_running_loop().time() + _TICK_S
        left_s = []
        for pull in self._pulls:
            if pull.deadline_s <= now_s:
                pull.end()
            else:
                left_s.append(pull.deadline_s)
        if left_s:
            self._wake_at(min(left_s))


class Pulling:
    """The context of one pull: limits its time, and ends it when the link is closed.

    Raises:
        TransferTimeout: the body took longer than `timeout_s`.
        TransferCancelled: the link was closed before or during the body.
    """

    __slots__ = ("_cancelling", "_has_ended", "_pulls", "_task", "_timeout_s", "deadline_s")

    _task: asyncio.Task[object]
    _cancelling: int  # requests to cancel the task before this context was entered
    deadline_s: float  # on the loop's clock

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
        self.deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        self._pulls.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
