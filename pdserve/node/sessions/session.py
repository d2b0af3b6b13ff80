"""An open session, as its puller sees it: a link for the bytes, subscriptions and queries."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from kv_transfer.links.sharded_link import AnyLink
from pdserve.node.sessions.subscription import Notice, Subscription
from pdserve.protocol import (
    Announcement,
    HandoffEnded,
    HandoffRecord,
    NodeAddress,
    PrefixAnswer,
    PrefixQuery,
    Settle,
    Subscribe,
)
from pdserve.shared.clock import Clock
from pdserve.shared.errors import MalformedMessage, PeerLost, from_code
from pdserve.wire.outbox import Sender


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
