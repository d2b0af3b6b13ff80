"""What comes in over a WebSocket, and whether there is still somebody at its other end.

A client that was cut off without a word, by a proxy or a lost network, is silent for ever. So it is
pinged, which also keeps proxies from ending a connection that is quiet while the model thinks.
Silence is counted in pings, not in seconds: a process that was held up itself blames nobody.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import ceil

from aiohttp import WSMessage, WSMsgType, web

from coordinator.api.config import ApiConfig


class SocketInbox:
    """The messages of one client. Has one reader, and one task that watches."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        config: ApiConfig,
    ) -> None:
        """`socket` leaves pings and pongs to its reader."""
        self._socket = socket
        self._transport = transport  # below it; None: the client is gone already
        self._ping_s = config.keep_alive_s
        self._max_unanswered = ceil(config.stall_timeout_s / config.keep_alive_s)
        self._num_unanswered = 0  # pings in a row
        self._is_listening = False  # what is not read may be the answer

    async def receive(self) -> WSMessage:
        """The next message, or how the connection ended."""
        while True:
            self._is_listening = True
            try:
                message: WSMessage = await self._socket.receive()
            finally:
                self._is_listening = False
            self._num_unanswered = 0
            if message.type is WSMsgType.PING:
                await self._socket.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                return message

    async def watch(self) -> None:
        """Ping until the client is gone; break the connection when it has not answered for long."""
        with suppress(ConnectionError):
            await asyncio.sleep(self._ping_s)
            while self._num_unanswered < self._max_unanswered:
                self._num_unanswered += self._is_listening
                with suppress(TimeoutError):  # it reads nothing either
                    async with asyncio.timeout(self._ping_s):
                        await self._socket.ping()
                await asyncio.sleep(self._ping_s)
            if self._transport is not None:
                self._transport.abort()
