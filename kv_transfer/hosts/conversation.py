"""Messages over a socket, with TLS or without, on the event loop: sent at once, read one by one."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import msgspec

from kv_transfer.transports.sockets import keep_alive, receive_exactly, send_all
from pdserve.shared.errors import PeerLost

M = TypeVar("M")

_LENGTH: Final = struct.Struct("!I")
_MOST_BYTES: Final = 256 << 20  # of a message: generations of all blocks
MOST_UNSENT: Final = 2 * _MOST_BYTES  # bytes; more is said to nobody who reads


class HostConversation(Generic[M]):
    """One end. `M` is what the other end says. Belongs to the event loop."""

    def __init__(self, sock: socket.socket, heard: msgspec.msgpack.Decoder[M]) -> None:
        """Use a connected socket, which belongs to this from now on."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        self._sock = sock
        self._heard = heard
        self._unsent: deque[bytes] = deque()
        self._num_unsent = 0  # bytes
        self._has_unsent = asyncio.Event()
        self._sending = asyncio.create_task(self._send())

    def say(self, message: msgspec.Struct) -> None:
        """Send a message, behind those before it.

        If the connection broke, or the other end does not read, `hear` says so.
        """
        packed = framed(message)
        self._num_unsent += len(packed)
        if self._num_unsent > MOST_UNSENT:
            self._unsent.clear()
            self._shut_down()
            return
        self._unsent.append(packed)
        self._has_unsent.set()

    async def hear(self) -> M:
        """Wait for the next message.

        Raises:
            PeerLost: the connection broke, what is said is not read, or this is no message.
        """
        try:
            return await receive_framed(self._sock, self._heard, _MOST_BYTES)
        except PeerLost as error:
            if self._num_unsent > MOST_UNSENT:
                raise PeerLost(f"it has not read {self._num_unsent >> 20} MiB") from error
            raise

    async def close(self) -> None:
        """Close the connection; what has not been sent is lost."""
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        self._shut_down()
        self._sock.close()

    def _shut_down(self) -> None:
        with suppress(OSError):  # it is broken already
            self._sock.shutdown(socket.SHUT_RDWR)

    async def _send(self) -> None:
        with suppress(OSError):
            while True:
                await self._has_unsent.wait()
                self._has_unsent.clear()
                while self._unsent:
                    packed = self._unsent.popleft()
                    await send_all(self._sock, packed)
                    self._num_unsent -= len(packed)


def framed(message: msgspec.Struct) -> bytes:
    """A message as it is sent: its length, and msgpack."""
    packed = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(packed)) + packed


async def receive_framed(
    sock: socket.socket, decoder: msgspec.msgpack.Decoder[M], most_bytes: int, begun: bytes = b""
) -> M:
    """Receive a message that was sent as `framed` makes it.

    Args:
        sock: non-blocking.
        decoder: of such messages.
        most_bytes: of a message.
        begun: what has been received of it already, length included.

    Raises:
        PeerLost: the connection broke, or this is no message.
    """
    try:
        head = begun + await receive_exactly(sock, max(0, _LENGTH.size - len(begun)))
        if len(head) < _LENGTH.size:
            raise PeerLost("the other end closed the connection")
        (length,) = _LENGTH.unpack(head[: _LENGTH.size])
        if length > most_bytes:
            raise PeerLost(f"a message of {length} bytes: not the other end of a node's host")
        first = head[_LENGTH.size :]
        packed = first + await receive_exactly(sock, max(0, length - len(first)))
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from error
    try:
        return decoder.decode(packed)
    except msgspec.MsgspecError as error:
        raise PeerLost(f"not a message that is due: {error}") from error


def encoded(result: Any) -> bytes:
    """A message that answers a call."""
    return b"" if result is None else msgspec.msgpack.encode(result)
