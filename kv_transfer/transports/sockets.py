"""Waiting for raw non-blocking sockets, with TLS or without, on asyncio's event loop and uvloop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_RECEIVE_BYTES = 64 << 10
_IDLE_S, _BETWEEN_S = 1, 1  # of silence, and between questions; they cannot be shorter


async def wait_readable(sock: socket.socket) -> None:
    """Wait until there is something to read, the end of the stream, or an error."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return  # it has been read from the kernel already
    loop = asyncio.get_running_loop()
    await _called_once(loop.add_reader, loop.remove_reader, sock)


async def wait_writable(sock: socket.socket) -> None:
    """Wait until there is room to write, or an error."""
    loop = asyncio.get_running_loop()
    await _called_once(loop.add_writer, loop.remove_writer, sock)


async def _called_once(
    add: Callable[[int, Callable[[asyncio.Future[None]], None], asyncio.Future[None]], object],
    remove: Callable[[int], object],
    sock: socket.socket,
) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(sock.fileno(), _wake, ready)
    try:
        await ready
    finally:
        remove(sock.fileno())


class Watch:
    """`wait_readable`, often, with one call to the event loop for all, and without TLS.

    Until `stop`, which is before the socket is closed, nothing else may wait for that.
    """

    __slots__ = ("_sock", "_waiting", "is_watching")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_watching = False  # the event loop calls when there is something
        self._waiting: asyncio.Future[None] | None = None

    async def ready(self) -> None:
        """Wait until there is something to read, the end of the stream, or an error."""
        loop = asyncio.get_running_loop()
        if not self.is_watching:
            loop.add_reader(self._sock.fileno(), self._look)
            self.is_watching = True
        self._waiting = loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def stop(self) -> None:
        """Watch it no longer, until it is waited for again. Idempotent."""
        if self.is_watching:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self.is_watching = False

    def _look(self) -> None:
        if self._waiting is None:  # it would be called again and again
            self.stop()
        else:
            _wake(self._waiting)


def has_ended(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection, and nothing is left to read."""
    try:
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK)  # also below TLS
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def watching_end(sock: socket.socket) -> Iterator[asyncio.Future[None]]:
    """A future that is done when the other end closes the connection.

    Nothing else may wait for the socket meanwhile. If there is something to read, the future is
    never done.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def look() -> None:
        loop.remove_reader(sock.fileno())
        if has_ended(sock):
            ended.set_result(None)

    loop.add_reader(sock.fileno(), look)
    try:
        yield ended
    finally:
        loop.remove_reader(sock.fileno())
        ended.cancel()


async def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive `num_bytes` bytes, or fewer if the stream ends; memory grows as they arrive.

    Raises:
        OSError: the connection broke.
    """
    received = bytearray()
    while len(received) < num_bytes:
        try:
            part = sock.recv(min(num_bytes - len(received), _RECEIVE_BYTES))
        except (BlockingIOError, ssl.SSLWantReadError):
            await wait_readable(sock)
            continue
        if not part:
            break
        received += part
    return bytes(received)


@contextmanager
def corked(sock: socket.socket) -> Iterator[None]:
    """Send in full segments meanwhile: small frames do not wake the other end one by one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    try:
        yield
    finally:
        with suppress(OSError):  # it has been closed
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


def send_now(sock: socket.socket, data: bytes) -> bytes:
    """Send what there is room for, without waiting; returns the rest.

    Raises:
        OSError: the connection broke.
    """
    try:
        return data[sock.send(data) :]
    except (BlockingIOError, ssl.SSLWantWriteError):
        return data


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all of `data`.

    Raises:
        OSError: the connection broke.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            await wait_writable(sock)


def keep_alive(sock: socket.socket, lost_s: int = 5) -> None:
    """Have the kernel end a connection `lost_s` after its other end's host has lost its power.

    Such a host says nothing: after a second of silence the kernel asks. A process that does not run
    is no such host: its kernel answers.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (lost_s - _IDLE_S) // _BETWEEN_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_s)


async def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Resolve a host for TCP: (address family, address). Numeric addresses need no thread.

    Raises:
        OSError: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
