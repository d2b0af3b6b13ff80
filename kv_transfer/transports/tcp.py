"""TCP, the puller's end: any host. One connection per read in flight; idle ones are used again.

A connection whose read did not come to its end is closed: closing is the fence, since nothing can
be received from a closed socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import numpy as np

from kv_transfer.threads import CancelFlag, CopyThreads, slice_s
from kv_transfer.transports.frames import (
    MAX_VERDICT_BYTES,
    GarbledFrame,
    PullRequest,
    Verdict,
    receive_frame,
    send_frame,
)
from kv_transfer.transports.interface import Read
from kv_transfer.transports.sockets import resolve, wait_readable
from pdserve import _native
from pdserve.errors import PeerLost, StaleIncarnation, StaleTicket, TicketInvalid
from pdserve.protocol import ExporterWelcome, TransportOffer

_MAX_IDLE = 8  # connections kept for the next reads

# After these the stream is at a frame border, and both ends know it.
_CLEAN_ENDS = (StaleTicket, TicketInvalid, StaleIncarnation)


class _Unanswered(PeerLost):
    """The connection ended before the exporter said anything: harmless on one that was idle."""


class TcpTransport:
    """Opens a connection to see that there is one; `TcpChannel` does the rest."""

    name = "tcp"
    needs_same_host = False

    def __init__(self, threads: CopyThreads) -> None:
        self._threads = threads

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> TcpChannel:
        """Raises PeerLost: nobody listens there."""
        channel = TcpChannel(offer.endpoint, self._threads)
        await channel.open()
        return channel


class TcpChannel:
    """Connections to one exporter. Owns its idle sockets; a read owns the one it uses."""

    def __init__(self, endpoint: str, threads: CopyThreads) -> None:
        self._endpoint = endpoint
        self._threads = threads
        self._idle: list[socket.socket] = []
        self._is_closed = False

    async def open(self) -> None:
        """Have one connection ready. Raises PeerLost."""
        self._idle.append(await self._dial())

    async def read(self, read: Read) -> None:
        """As Channel.read."""
        sock = self._take_idle()
        if sock is not None:
            # The exporter may have closed it meanwhile; nothing was received then, so ask again.
            with suppress(_Unanswered):
                await self._read_on(sock, read)
                return
        await self._read_on(await self._dial(), read)

    async def close(self) -> None:
        """Close the idle connections."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    async def _read_on(self, sock: socket.socket, read: Read) -> None:
        with self._lend(sock):
            try:
                await self._ask(sock, read)
                await self._receive(sock, read)
                (await receive_frame(sock, Verdict, MAX_VERDICT_BYTES)).check()
            except OSError as error:
                raise PeerLost(f"the connection to {self._endpoint} broke: {error}") from error

    async def _ask(self, sock: socket.socket, read: Read) -> None:
        """Raises what the exporter has against it, or _Unanswered."""
        try:
            await send_frame(sock, PullRequest(read.sealed, read.begin, read.end))
            verdict = await receive_frame(sock, Verdict, MAX_VERDICT_BYTES)
        except (OSError, PeerLost) as error:
            raise _Unanswered(f"{self._endpoint} did not answer: {error}") from error
        verdict.check()
        if verdict.num_bytes != read.num_bytes:
            raise GarbledFrame(
                f"{self._endpoint} announced {verdict.num_bytes} bytes instead of {read.num_bytes}"
            )

    async def _receive(self, sock: socket.socket, read: Read) -> None:
        into = np.ascontiguousarray(read.spans[:, 1:])  # [n, 2] (offset, nbytes)
        cancel = CancelFlag()
        position, end = 0, read.num_bytes
        while position < end:
            await wait_readable(sock)
            job = partial(
                _native.recv_spans,
                sock.fileno(),
                read.destination,
                into,
                position,
                cancel.byte,
                slice_s(end),
            )
            position = await self._threads.move(job, cancel, end)

    @contextmanager
    def _lend(self, sock: socket.socket) -> Iterator[None]:
        """Takes the socket back when its stream is at a frame border, else closes it."""
        at_border = False
        try:
            yield
            at_border = True
        except _CLEAN_ENDS:
            at_border = True
            raise
        finally:
            if at_border and not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(sock)
            else:
                sock.close()

    def _take_idle(self) -> socket.socket | None:
        return self._idle.pop() if self._idle else None

    async def _dial(self) -> socket.socket:
        with ExitStack() as undo:
            try:
                host, _, port = self._endpoint.rpartition(":")
                family, address = await resolve(host.strip("[]"), int(port))
                sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().sock_connect(sock, address)
            except (OSError, ValueError) as error:
                raise PeerLost(f"cannot connect to {self._endpoint!r}: {error}") from error
            undo.pop_all()
            return sock
