"""Accepts connections on a listening socket; used by all servers here."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from kv_transfer.statistics import ExporterStatistics

log = logging.getLogger(__name__)

# After accept has failed because the process is out of descriptors: no event tells when to retry.
_RETRY_S = 0.1


class Acceptor:
    """Owns the listener. The callback gets each accepted socket, non-blocking, and closes it."""

    def __init__(self, listener: socket.socket, on_accept: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._on_accept = on_accept
        self._task = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting, close the listener."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            sock.setblocking(False)
            try:
                self._on_accept(sock)
            except Exception:
                log.exception("a connection cannot be served: closed")
                sock.close()
            await asyncio.sleep(0)  # many new connections must not starve the existing ones


class Connections:
    """Serves each connection to a listener in a task of its own, so many at a time at most."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
        most: int,
        statistics: ExporterStatistics,
    ) -> None:
        """Accept connections. Those beyond `most` are closed, and counted as turned away."""
        self._serve = serve
        self._most = most
        self._statistics = statistics
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(listener, self._admit)

    async def close(self) -> None:
        """Stop accepting, and end all connections."""
        await self._acceptor.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, sock: socket.socket) -> None:
        if len(self._tasks) >= self._most:
            self._statistics.turned_away += 1
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not only in the task: if it is cancelled before it starts, it never runs.
        task.add_done_callback(lambda _: sock.close())
