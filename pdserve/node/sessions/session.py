"""An open session, as its puller sees it: a link for the bytes, subscriptions and queries.

A subscription is to the handoff of one request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kv_transfer.links.sharded_link import AnyLink
from pdserve.protocol import (
    Announcement,
    HandoffEnded,
    HandoffRecord,
    NodeAddress,
    PrefixAnswer,
    PrefixQuery,
    Renew,
    Settle,
    Subscribe,
    TakeOver,
)
from pdserve.shared.clock import Clock
from pdserve.shared.errors import MalformedMessage, PdserveError, PeerLost, from_code
from pdserve.wire.outbox import Sender

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


class Session:
    """An open session: the link for pulling bytes, and the subscriptions and queries over it."""

    def __init__(self, peer: NodeAddress, link: AnyLink, outbox: Sender, clock: Clock) -> None:
        self.peer = peer
        self.link = link
        self._outbox = outbox
        self._clock = clock
        self._subscriptions: dict[str, Subscription] = {}  # by id
        self._answers: dict[str, asyncio.Future[PrefixAnswer]] = {}  # by query id
        self._lost: PeerLost | None = None

    @asynccontextmanager
    async def subscribed(
        self, request_id: str, *, at_end: bool = False, num_emitted: int = 0, taker: str = ""
    ) -> AsyncIterator[Subscription]:
        """Subscribe to a request's handoff; it is settled when the context ends.

        With `at_end`, nothing is announced until all of it can be pulled. With `num_emitted`, it is
        a stream that runs there, so many of its output tokens are known here, and the leg `taker`
        is to go on with it.

        Raises:
            PeerLost: the exporter is gone.
        """
        if self._lost is not None:
            raise self._lost
        subscription_id = secrets.token_hex(8)
        subscription = Subscription(subscription_id, self._outbox.send)
        self._subscriptions[subscription_id] = subscription
        self._outbox.send(
            Subscribe(
                request_id=request_id,
                subscription_id=subscription_id,
                at_end=at_end,
                num_emitted=num_emitted,
                taker=taker,
            )
        )
        try:
            yield subscription
        finally:
            del self._subscriptions[subscription_id]
            self.settle(subscription_id, was_pulled=subscription.was_pulled)

    @asynccontextmanager
    async def prefix(
        self, first_block: int, hashes: Sequence[bytes]
    ) -> AsyncIterator[PrefixAnswer]:
        """Ask for these blocks of a prompt; the exporter holds what it has while the context lasts.

        Raises:
            PeerLost: the exporter is gone.
        """
        if self._lost is not None:
            raise self._lost
        query = PrefixQuery(
            query_id=secrets.token_hex(8), first_block=first_block, hashes=list(hashes)
        )
        answer = asyncio.get_running_loop().create_future()
        self._answers[query.query_id] = answer
        self._outbox.send(query)
        was_pulled = False
        try:
            yield await answer
            was_pulled = True
        finally:
            del self._answers[query.query_id]
            self.settle(query.query_id, was_pulled=was_pulled)

    def settle(self, subscription_id: str, *, was_pulled: bool) -> None:
        """Tell the exporter that the blocks of a subscription or query are not needed any more."""
        self._outbox.send(Settle(subscription_id=subscription_id, pulled=was_pulled))

    def receive(self, message: msgspec.Struct) -> None:
        """Dispatch a message of the exporter; for a subscription that has ended it is dropped."""
        if isinstance(message, PrefixAnswer):
            answer = self._answers.get(message.query_id)
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        if not isinstance(message, Announcement | HandoffRecord | HandoffEnded):
            name = type(message).__name__
            raise MalformedMessage(f"an exporter cannot send {name} after its welcome")
        subscription = self._subscriptions.get(message.subscription_id)
        if subscription is None:
            return
        if isinstance(message, HandoffEnded):
            subscription.fail(from_code(message.code, message.message))
        else:
            subscription.put(Notice(message, self._clock.now()))

    def lose(self, error: PeerLost) -> None:
        """The session broke: all subscriptions and queries fail with this error."""
        self._lost = error
        for subscription in self._subscriptions.values():
            subscription.fail(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
