"""Shares a pool's file descriptor with pullers on the same host, over an abstract unix socket.

The socket disappears with the process, so there is nothing to clean up. A client must run as the
same user, which the kernel tells, and send an access token. The answer is a description of the pool
together with the descriptor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from kv_transfer.transports.acceptor import Connections
from kv_transfer.transports.frames import receive_access, send_access
from kv_transfer.transports.interface import Source
from kv_transfer.transports.sockets import wait_readable
from pdserve.protocol import ExporterWelcome
from pdserve.shared.errors import AccessDenied, PeerLost

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_DESCRIPTION_BYTES = 512
_ACCESS_S = 5.0  # deadline for the access token
_MAX_CLIENTS = 256


class PoolDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Describes the pool whose descriptor is sent along."""

    num_blocks: int
    block_bytes: int
    ipc_handle: bytes = b""  # CUDA IPC handle of the blocks, if they are on a GPU
    device: str = ""  # PCI address of that GPU

    def check(self, welcome: ExporterWelcome) -> None:
        """Raises PeerLost: this is not the pool in the welcome."""
        expected = (welcome.num_blocks, welcome.layout.block_bytes)
        if (self.num_blocks, self.block_bytes) != expected:
            raise PeerLost(
                f"received a pool of {self.num_blocks} blocks of {self.block_bytes} bytes, not "
                f"one of {expected[0]} of {expected[1]}"
            )


class PoolShare:
    """The exporter's end. Owns the listener and the connections of its clients."""

    def __init__(
        self, source: Source, description: PoolDescription, fd: int, *, stays_open: bool = False
    ) -> None:
        """Args:
        source: the exporter of the pool.
        description: sent to every client.
        fd: the descriptor to share; the caller keeps its own.
        stays_open: keep each connection until the client closes it, so that its end tells the
            client that the pool was closed or its process died.
        """
        self._source = source
        self._description = msgspec.msgpack.encode(description)
        self._fd = fd
        self._stays_open = stays_open
        self._connections: Connections | None = None

    async def start(self) -> str:
        """Listen on a new abstract name, which is returned.

        Raises:
            OSError: the process is out of descriptors.
        """
        name = f"pdserve-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._connections = Connections(
            listener, self._share_with, _MAX_CLIENTS, self._source.statistics
        )
        return name

    async def close(self) -> None:
        """Stop listening, and close all connections. Mappings of clients stay valid."""
        if self._connections is not None:
            await self._connections.close()

    async def _share_with(self, sock: socket.socket) -> None:
        statistics = self._source.statistics
        with sock:
            try:
                _check_same_user(sock)
                async with asyncio.timeout(_ACCESS_S):
                    self._source.check_access(await receive_access(sock))
                # Does not block: the buffer of a new socket has room for the description.
                socket.send_fds(sock, [self._description], [self._fd])
            except AccessDenied as error:  # counted by check_access
                log.warning("a connection for the KV pool was closed: %s", error)
                return
            except (PeerLost, OSError) as error:  # TimeoutError is an OSError
                statistics.garbage += 1
                log.warning(
                    "a connection for the KV pool was closed: %s", str(error) or "no access token"
                )
                return
            statistics.pools_shared += 1
            if self._stays_open:
                await wait_readable(sock)


@dataclass(frozen=True, slots=True)
class SharedPool:
    """What a client has obtained. The caller closes `sock` and `fd`."""

    sock: socket.socket  # the connection, non-blocking
    description: PoolDescription
    fd: int


async def obtain_pool(endpoint: str, welcome: ExporterWelcome) -> SharedPool:
    """Obtain the pool in the welcome from the socket named `endpoint`.

    Raises:
        PeerLost: nobody listens, another user, no access, or a pool other than in the welcome.
    """
    with ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, f"\0{endpoint}")
            _check_same_user(sock)
            await send_access(sock, welcome.access)
            await wait_readable(sock)
            description, fd = _receive_descriptor(sock)
        except OSError as error:
            raise PeerLost(f"the pool's descriptor cannot be obtained: {error}") from error
        undo.callback(os.close, fd)
        description.check(welcome)
        undo.pop_all()
        return SharedPool(sock, description, fd)


def _check_same_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise PeerLost(f"process {pid} at the other end is user {uid}, not {os.geteuid()}")


def _receive_descriptor(sock: socket.socket) -> tuple[PoolDescription, int]:
    said, fds, _, _ = socket.recv_fds(
        sock, _DESCRIPTION_BYTES, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    with ExitStack() as undo:
        for fd in fds:
            undo.callback(os.close, fd)
        try:
            description = msgspec.msgpack.decode(said, type=PoolDescription)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerLost(f"received {said[:80]!r}, which describes no pool: {error}") from error
        if len(fds) != 1:
            raise PeerLost(f"received {description} with {len(fds)} descriptors instead of one")
        undo.pop_all()
    return description, fds[0]
