"""Writes what is stored a moment later, in transactions: all that changes during one is the next.

An answer that says that something is stored waits for its transaction (`saved`). What could not be
written is written with what comes next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from coordinator.stateful.storage.backing import Key
from pdserve.shared.errors import StoreUnavailable

log = logging.getLogger(__name__)

V = TypeVar("V")


class WriteBehind(Generic[V]):
    """One transaction at a time.

    Args:
        where: what is written to, for the log.
        write: runs one transaction: writes all of a batch, or raises and has written nothing.
        merge: what is to be written of a key for which both the first and the second were put.
    """

    def __init__(
        self,
        where: str,
        write: Callable[[Mapping[Key, V]], Awaitable[None]],
        merge: Callable[[V, V], V],
    ) -> None:
        self._where = where
        self._write = write
        self._merge = merge
        self._batch: dict[Key, V] = {}  # of the running transaction
        self._next: asyncio.Future[None] | None = None  # the end of the transaction to come
        self._running: asyncio.Future[None] | None = None
        self.pending: dict[Key, V] = {}
        self.is_behind = False  # the last transaction failed

    def __contains__(self, key: Key) -> bool:
        """Whether something is still to be written for this key."""
        return key in self.pending or key in self._batch

    def put(self, key: Key, value: V) -> None:
        """Have a value written; it must not change any more."""
        if key in self.pending:
            value = self._merge(self.pending[key], value)
        self.pending[key] = value
        self.begin()

    async def saved(self) -> None:
        """Wait until all that was put so far is written. Raises StoreUnavailable."""
        waits_for = self._next or self._running
        if waits_for is not None:
            await asyncio.shield(waits_for)

    def begin(self) -> None:
        """Begin the next transaction once the running one has ended."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
        if self._running is not None:
            return
        self._running, self._next = self._next, None
        self._batch, self.pending = self.pending, {}
        writing = asyncio.ensure_future(self._write(self._batch))
        writing.add_done_callback(partial(self._over, self._running))

    async def close(self) -> None:
        """Write what is still to be written."""
        if self.pending:
            self.begin()
        while self._running is not None:
            await asyncio.wait([self._running])
        if self.pending:
            log.error("%d stored entries are lost: see above", len(self.pending))

    def _over(self, ended: asyncio.Future[None], writing: asyncio.Future[None]) -> None:
        self._running = None
        batch, self._batch = self._batch, {}
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception()
        if error is None:
            ended.set_result(None)
            if self.is_behind:
                log.info("stored responses are written again: %s", self._where)
            self.is_behind = False
        else:
            for key, value in self.pending.items():
                batch[key] = self._merge(batch[key], value) if key in batch else value
            self.pending = batch
            if not self.is_behind:
                why = error.__cause__ or error
                log.error("stored responses cannot be written: %s: %s", self._where, why)
            self.is_behind = True
            ended.set_exception(StoreUnavailable("what the call stores cannot be written now"))
            ended.exception()  # not every transaction is waited for
        if self._next is not None:
            self.begin()
