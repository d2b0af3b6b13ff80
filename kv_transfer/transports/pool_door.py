"""The door of a pool on this host: an abstract unix socket that hands out a descriptor.

It is gone with the process, so there is nothing to clean up. Whoever connects shows, by the
kernel's word, to be the same user, and then an access token; the answer is a card that says what
the pool is, and the descriptor with it.
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

from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.frames import receive_access, send_access
from kv_transfer.transports.interface import Source
from kv_transfer.transports.sockets import wait_readable
from pdserve.errors import AccessDenied, PeerLost
from pdserve.protocol import ExporterWelcome

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_CARD_BYTES = 512
_ASKING_S = 5.0  # from connecting to the access token
_MAX_VISITORS = 256


class PoolCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What the pool is whose descriptor comes with this."""

    num_blocks: int
    block_bytes: int
    ipc_handle: bytes = b""  # what CUDA opens the blocks by, where they are not in the descriptor
    device: str = ""  # UUID of the GPU they are on

    def check(self, welcome: ExporterWelcome) -> None:
        """Raises PeerLost: it is not the card of the welcome's pool."""
        expected = (welcome.num_blocks, welcome.layout.block_bytes)
        if (self.num_blocks, self.block_bytes) != expected:
            raise PeerLost(
                f"received a pool of {self.num_blocks} blocks of {self.block_bytes} bytes, not "
                f"one of {expected[0]} of {expected[1]}"
            )


class PoolDoor:
    """The exporter's end. Owns its listener and the connections of its visitors."""

    def __init__(
        self, source: Source, card: PoolCard, fd: int, *, stays_open: bool = False
    ) -> None:
        """Args:
        source: whose pool it is.
        card: says so.
        fd: to hand out; stays the caller's.
        stays_open: keep each connection until the visitor hangs up, so that its end tells him
            that the pool is closed or its process dead.
        """
        self._source = source
        self._card = msgspec.msgpack.encode(card)
        self._fd = fd
        self._stays_open = stays_open
        self._acceptor: Acceptor | None = None
        self._visitors: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen on a fresh abstract name, which is returned.

        Raises:
            OSError: there is no descriptor left.
        """
        name = f"pdserve-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._acceptor = Acceptor(listener, self._admit)
        return name

    async def close(self) -> None:
        """Stop listening, hang up. What was handed out stays where it is."""
        if self._acceptor is not None:
            await self._acceptor.close()
        for task in self._visitors:
            task.cancel()
        await asyncio.gather(*self._visitors, return_exceptions=True)

    def _admit(self, sock: socket.socket) -> None:
        if len(self._visitors) >= _MAX_VISITORS:
            self._source.statistics.turned_away += 1
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._hand_over(sock))
        self._visitors.add(task)
        task.add_done_callback(self._visitors.discard)
        # Not in the task alone: one that is cancelled before it has begun never runs.
        task.add_done_callback(lambda _: sock.close())

    async def _hand_over(self, sock: socket.socket) -> None:
        statistics = self._source.statistics
        with sock:
            try:
                _check_same_user(sock)
                async with asyncio.timeout(_ASKING_S):
                    self._source.check_access(await receive_access(sock))
                # Never blocks: a fresh socket has room for the card.
                socket.send_fds(sock, [self._card], [self._fd])
            except AccessDenied as error:  # counted where it was refused
                logger.warning("a connection for the KV pool was closed: %s", error)
                return
            except (PeerLost, OSError) as error:  # TimeoutError is an OSError
                statistics.garbage += 1
                logger.warning(
                    "a connection for the KV pool was closed: %s", str(error) or "no access token"
                )
                return
            statistics.pools_shared += 1
            if self._stays_open:
                await wait_readable(sock)


@dataclass(frozen=True, slots=True)
class Handover:
    """What came out of the door; all of it is the receiver's to close."""

    sock: socket.socket  # to the door, non-blocking
    card: PoolCard
    fd: int


async def knock(endpoint: str, welcome: ExporterWelcome) -> Handover:
    """Obtain the welcome's pool at the door named `endpoint`.

    Raises:
        PeerLost: nobody there, another user, no access, or what came is not the welcome's pool.
    """
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, f"\0{endpoint}")
            _check_same_user(sock)
            await send_access(sock, welcome.access)
            await wait_readable(sock)
            card, fd = _receive_descriptor(sock)
        except OSError as error:
            raise PeerLost(f"the pool's descriptor cannot be obtained: {error}") from error
        undo.callback(os.close, fd)
        card.check(welcome)
        undo.pop_all()
        return Handover(sock, card, fd)


def _check_same_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise PeerLost(f"process {pid} at the other end is user {uid}, not {os.geteuid()}")


def _receive_descriptor(sock: socket.socket) -> tuple[PoolCard, int]:
    said, fds, _, _ = socket.recv_fds(
        sock, _CARD_BYTES, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    with ExitStack() as undo:
        for fd in fds:
            undo.callback(os.close, fd)
        try:
            card = msgspec.msgpack.decode(said, type=PoolCard)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerLost(f"received {said[:80]!r} instead of a pool's card: {error}") from error
        if len(fds) != 1:
            raise PeerLost(f"received {card} with {len(fds)} descriptors instead of one")
        undo.pop_all()
    return card, fds[0]
