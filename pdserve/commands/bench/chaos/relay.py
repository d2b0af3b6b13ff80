"""A TCP relay in front of the coordinator's gRPC port: the network as it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final, Self

_CHUNK: Final = 64 * 1024
_SENT_AGAIN_S: Final = 0.2  # the least time after which TCP sends a lost packet again


class Relay:
    """Forwards connections to `target`, late or not at all if it is told so."""

    def __init__(self, target: Callable[[], str], host: str = "127.0.0.1") -> None:
        """`target` returns host:port; asked with each connection. `host` is listened on."""
        self.delay_s = 0.0  # of every chunk, in both directions
        self.lost_share = 0.0  # of the chunks, which have to be sent again
        self._random = Random(0)
        self._target = target
        self._host = host
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection."""
        for connection in list(self._connections):
            connection.cancel()

    def swallow(self, is_swallowing: bool) -> None:
        """From now on pass nothing more, without breaking anything; or pass it all."""
        if is_swallowing:
            self._passes.clear()
        else:
            self._passes.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        host, _, port = self._target().rpartition(":")
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ways = (self._pump(reader, far_writer), self._pump(far_reader, writer))
            tasks = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in tasks:
                    way.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the coordinator is gone, or the connection was cut
        finally:
            self._connections.discard(task)
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                is_lost = self._random.random() < self.lost_share
                delay_s = self.delay_s + (_SENT_AGAIN_S if is_lost else 0.0)
                if delay_s:
                    await asyncio.sleep(delay_s)
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
