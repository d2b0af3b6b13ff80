"""Receives messages of a WebSocket, and detects whether its client is still connected.

A client that is cut off without a close, by a proxy or a lost network, is silent forever. So it is
pinged, which also keeps proxies from closing a connection that is idle during generation. Silence
is counted in unanswered pings, not in seconds, so that a stall of this process is not taken for a
lost client.

What arrives is counted before it is parsed: its bytes against the budget of bodies, and its frames.
A client that sends more than there is room for is not heard any more.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import ceil

from aiohttp import WSMessage, WSMsgType, web

from coordinator.api.config import ApiConfig
from coordinator.api.read.body_budget import Body
from coordinator.api.server.connection import Connection
from coordinator.stateful.frame_count import FrameCount

MAX_MESSAGE_BYTES = 4 * 2**20  # aiohttp unmasks a message in one turn of the event loop
_HEAD_BYTES = 14  # of a frame, at most


class SocketInbox:
    """The messages of one client. One task calls `receive`, another one `watch`."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        config: ApiConfig,
        held: Body,
    ) -> None:
        """`socket` must pass pings and pongs to its reader (autoping=False)."""
        self._socket = socket
        self._held = held  # what has arrived, and has not been returned as a message
        self._frames = FrameCount()
        self.is_full = asyncio.Event()  # nothing is heard any more
        self._transport = transport  # of the socket; None: the client is already gone
        self._ping_s = config.keep_alive_s
        self._max_unanswered = ceil(config.stall_timeout_s / config.keep_alive_s)
        self._num_unanswered = 0  # pings in a row
        self._is_listening = False  # else a pong may be waiting to be read

    def listen(self, connection: Connection) -> None:
        """Begin to count what arrives, before the socket is prepared."""
        self._held.may_end(self.is_full.set)
        connection.count_frames(self._count)

    def _count(self, data: bytes) -> bool:
        if self.is_full.is_set():
            return False
        if self._held.try_take(len(data)) and self._frames.add(data):
            return True
        self.is_full.set()
        self._held.release()
        return False

    async def receive(self) -> WSMessage:
        """Return the next message, or the one that ends the connection."""
        while True:
            self._is_listening = True
            try:
                message: WSMessage = await self._socket.receive()
            finally:
                self._is_listening = False
            self._num_unanswered = 0
            self._frames.read()
            if isinstance(message.data, bytes):
                self._held.add(-len(message.data) - _HEAD_BYTES)
            if message.type is WSMsgType.PING:
                await self._socket.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                return message

    async def watch(self) -> None:
        """Ping until the client is gone; abort the connection after too many unanswered pings."""
        with suppress(ConnectionError):
            await asyncio.sleep(self._ping_s)
            while self._num_unanswered < self._max_unanswered:
                self._num_unanswered += self._is_listening
                with suppress(TimeoutError):  # the client is not reading
                    async with asyncio.timeout(self._ping_s):
                        await self._socket.ping()
                await asyncio.sleep(self._ping_s)
            if self._transport is not None:
                self._transport.abort()
