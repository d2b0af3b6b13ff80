"""Same host: the exporter hands out its pool's descriptor, the puller maps it read-only and copies.

The server accepts on an abstract unix socket (gone with the process, nothing to clean up), looks at
the kernel's word for who is there, sends the descriptor and hangs up; it reads nothing, so there is
no garbage to parse. After that the exporter's CPU takes no part: a pull goes on while the exporter
is stopped, and even when it has died - its memory then stands still, generations included, so what
validates is what the ticket means. The mapping holds that memory until the channel is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from functools import partial

from kv_transfer.generations import check_generations
from kv_transfer.memory import RemotePool
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.interface import Read, Source
from kv_transfer.transports.sockets import wait_readable
from pdserve import _native
from pdserve.errors import PeerLost
from pdserve.protocol import ExporterWelcome, TransportOffer

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_GREETING_BYTES = 512


class ShmServer:
    """Gives the pool's descriptor to every process of the same user that connects."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._acceptor: Acceptor | None = None

    async def start(self, host: str, advertised_host: str) -> TransportOffer:
        """Listen on a fresh abstract name; both hosts are ignored."""
        name = f"pdserve-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._acceptor = Acceptor(listener, self._hand_over)
        return TransportOffer(name="shm", endpoint=name)

    async def close(self) -> None:
        """Stop listening. Pools handed out stay mapped where they are."""
        if self._acceptor is not None:
            await self._acceptor.close()

    def _hand_over(self, sock: socket.socket) -> None:
        """Never blocks: a fresh socket has room for the greeting."""
        statistics, pool = self._source.statistics, self._source.pool
        with sock:
            try:
                _check_same_user(sock)
                socket.send_fds(sock, [_greeting(pool.num_blocks, pool.block_bytes)], [pool.fd])
            except (PeerLost, OSError) as error:
                statistics.garbage += 1
                logger.warning("a connection for the KV pool was closed: %s", error)
            else:
                statistics.pools_shared += 1


class ShmTransport:
    """Obtains the descriptor; `ShmChannel` does the rest."""

    name = "shm"
    needs_same_host = True

    def __init__(self, threads: CopyThreads) -> None:
        self._threads = threads

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> ShmChannel:
        """Raises PeerLost: nobody there, another user, or what came is not the welcome's pool."""
        expected = _greeting(welcome.num_blocks, welcome.layout.block_bytes)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with sock:
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, f"\0{offer.endpoint}")
                _check_same_user(sock)
                await wait_readable(sock)
                fd = _receive_descriptor(sock, expected)
            except OSError as error:
                raise PeerLost(f"the pool's descriptor cannot be obtained: {error}") from error
        pool = RemotePool(fd, welcome.num_blocks, welcome.layout.block_bytes)
        return ShmChannel(pool, self._threads)


class ShmChannel:
    """One exporter's pool, mapped here. A pull is one native copy off the interpreter lock."""

    def __init__(self, pool: RemotePool, threads: CopyThreads) -> None:
        self._pool: RemotePool | None = pool
        self._threads = threads

    async def read(self, read: Read) -> None:
        """As Channel.read; the exporter takes no part, so PeerLost does not occur."""
        pool = self._pool
        if pool is None:
            raise PeerLost("the channel is closed")
        cancel = CancelFlag()
        copy = partial(_native.copy_spans, read.destination, pool.flat, read.spans, cancel.byte)
        await self._threads.move(copy, cancel, read.num_bytes)
        check_generations(pool.generations, read.block_ids, read.generations)

    async def close(self) -> None:
        """Unmap."""
        self._pool = None


def _greeting(num_blocks: int, block_bytes: int) -> bytes:
    return f"pdserve KV pool, {num_blocks} blocks of {block_bytes} bytes".encode()


def _check_same_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise PeerLost(f"process {pid} at the other end is user {uid}, not {os.geteuid()}")


def _receive_descriptor(sock: socket.socket, expected: bytes) -> int:
    greeting, fds, _, _ = socket.recv_fds(
        sock, _GREETING_BYTES, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    if greeting != expected or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise PeerLost(f"received {greeting[:80]!r} and {len(fds)} descriptors, not {expected!r}")
    return fds[0]
