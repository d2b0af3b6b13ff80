"""The puller's end of a two-sided transport: connects to a pull_server.py, and sends requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import numpy as np
from msgspec.structs import astuple

from kv_transfer.transports.block_read import BlockRead
from kv_transfer.transports.frames import (
    MAX_VERDICT_BYTES,
    VALID,
    GarbledFrame,
    PullRequest,
    PullVerdict,
    first_verdict,
    frame_bytes,
    receive_frame,
    send_access,
    send_frame,
)
from kv_transfer.transports.interface import Read
from kv_transfer.transports.sockets import Watch, keep_alive, resolve, send_all, send_now
from kv_transfer.transports.tls import NodeTls
from pdserve import _native
from pdserve.shared.errors import PeerLost, StaleIncarnation, StaleTicket, TicketInvalid

# Without a sign of the exporter's host, a pull is made over another connection. The old one would
# be silent for as long again once the host is back: its kernel waits twice as long each time.
_LOST_S: Final = 2
# After these errors the stream is at a frame border, and the connection can be used again.
_CLEAN_ENDS = (StaleTicket, TicketInvalid, StaleIncarnation)


class Unanswered(PeerLost):
    """The connection ended before the exporter answered; harmless if it was idle before."""


async def dial(endpoint: str, access: bytes, tls: NodeTls | None) -> socket.socket:
    """Connect to an exporter's "host:port", and send the access token.

    Raises:
        PeerLost: nobody listens there, or nobody to be trusted.
    """
    with ExitStack() as undo:
        try:
            family, address = await resolve(*_split(endpoint))
            sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, _LOST_S)
            await asyncio.get_running_loop().sock_connect(sock, address)
            if tls is not None:
                sock = undo.enter_context(await tls.connect(sock))
            await send_access(sock, access)
        except (OSError, ValueError) as error:
            raise PeerLost(f"cannot connect to {endpoint!r}: {error}") from error
        undo.pop_all()
        return sock


async def ask(sock: socket.socket, read: Read, endpoint: str) -> None:
    """Send the request for a read, and receive the first verdict; the bytes follow.

    Raises:
        Unanswered: nothing was received.
        GarbledFrame: not an answer to this request.
        StaleTicket, TicketInvalid, StaleIncarnation, AccessDenied: reported by the exporter.
    """
    with unanswered(endpoint):
        await send_frame(sock, PullRequest.of(read))
    await receive_first_verdict(sock, read.num_bytes, endpoint)


async def receive_first_verdict(sock: socket.socket, num_bytes: int, endpoint: str) -> None:
    """Receive the verdict on a request for so many bytes. Raises as `ask`."""
    with unanswered(endpoint):
        verdict = await receive_frame(sock, PullVerdict, MAX_VERDICT_BYTES)
    verdict.check()
    if verdict.num_bytes != num_bytes:
        raise GarbledFrame(f"{endpoint} announced {verdict.num_bytes} bytes instead of {num_bytes}")


@contextmanager
def unanswered(endpoint: str) -> Iterator[None]:
    """Errors of a connection on which nothing of an answer has been received become Unanswered."""
    try:
        yield
    except GarbledFrame:
        raise
    except (OSError, PeerLost) as error:
        raise Unanswered(f"{endpoint} did not answer: {error}") from error


async def receive_few(sock: socket.socket, watch: Watch, read: BlockRead, endpoint: str) -> bool:
    """Send the request for few blocks, and receive them together with both verdicts.

    False: the first verdict is another one, and still to be received. Raises as `ask`.
    Only what is received here is waited for by the socket's `watch`.
    """
    rows, position = read.rows, 0
    head, tail = first_verdict(read.num_bytes), np.empty(len(VALID), np.uint8)
    end = len(head) + read.num_bytes + len(VALID)
    try:
        if left := send_now(sock, frame_bytes(PullRequest(read.sealed, *astuple(read.box)))):
            await send_all(sock, left)
        while True:  # what is there already, before anything is waited for
            position = _native.receive_blocks(
                sock.fileno(),
                head,
                read.destination.flat,
                rows.block_bytes,
                read.destination_ids,
                rows.rows,
                rows.last_rows,
                tail,
                position,
            )
            if position < 0:
                watch.stop()
                return False
            if position == end:
                break
            await watch.ready()
    except OSError as error:
        if position:
            raise
        raise Unanswered(f"{endpoint} did not answer: {error}") from error
    if (said := tail.tobytes()) != VALID:
        watch.stop()
        await receive_final_verdict(sock, said)
    return True


async def receive_final_verdict(sock: socket.socket, begun: bytes = b"") -> None:
    """Receive the exporter's verdict, or its rest, on the bytes that have arrived.

    Raises:
        StaleTicket: a block was reused meanwhile.
        PeerLost, OSError: there was no verdict.
    """
    (await receive_frame(sock, PullVerdict, MAX_VERDICT_BYTES, begun)).check()


def _split(endpoint: str) -> tuple[str, int]:
    """Split an exporter's endpoint: (host, port). Raises ValueError."""
    host, _, port = endpoint.rpartition(":")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"{port} is not a port")
    return host.strip("[]"), int(port)


@contextmanager
def lending(take_back: Callable[[], None], drop: Callable[[], None]) -> Iterator[None]:
    """Lend a connection to one read. It is taken back if the read ends at a frame border."""
    at_border = False
    try:
        yield
        at_border = True
    except _CLEAN_ENDS:
        at_border = True
        raise
    finally:
        if at_border:
            take_back()
        else:
            drop()
