"""The messages between the transfer benchmark and its two processes: requests with one reply each.

A message is its length and a msgpack body. Both ends are ours, and no other process has the socket.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from pdserve.protocol import ExporterWelcome
from pdserve.shared.errors import ClusterError

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 256 << 20


class BenchMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of every message here."""


class PoolsFilled(BenchMessage, frozen=True):
    """The first message of each process: its pools are filled."""

    has_huge_pages: bool


# ---- to the exporter -----------------------------------------------------------------------------


class Serve(BenchMessage, frozen=True):
    """Serve the pool by this transport only."""

    transport: str
    host: str  # address to listen on


class Served(BenchMessage, frozen=True):
    """How the pool can be pulled from, or why it cannot."""

    welcome: ExporterWelcome | None
    obstacle: str = ""


class Issue(BenchMessage, frozen=True):
    """Issue one ticket for each of these lists of blocks."""

    block_ids: list[list[int]]


class Issued(BenchMessage, frozen=True):
    """The tickets, in the same order."""

    tickets: list[bytes]


class AskCpu(BenchMessage, frozen=True):
    """Ask for the CPU time of the process."""


class Cpu(BenchMessage, frozen=True):
    """User and system time of all threads since the start of the process, in seconds."""

    used_s: float


# ---- to the puller -------------------------------------------------------------------------------


class ConnectTo(BenchMessage, frozen=True):
    """Connect by this transport, and close the previous link."""

    transport: str
    welcome: ExporterWelcome


class ConnectedTo(BenchMessage, frozen=True):
    """Whether the puller can use the transport."""

    obstacle: str = ""


class PullOrder(msgspec.Struct, frozen=True):
    """One pull: a ticket for some blocks, and their destinations."""

    ticket: bytes
    source_ids: list[int]  # blocks of the ticket; for the memcpy, which needs no ticket
    destination_ids: list[int]


class Verify(BenchMessage, frozen=True):
    """Pull into zeroed blocks, and compare every byte."""

    order: PullOrder
    timeout_s: float


class Verified(BenchMessage, frozen=True):
    """All bytes equal those of the exporter."""


class Measure(BenchMessage, frozen=True):
    """Pull one order after the other, with a memcpy of as many blocks before or after each."""

    orders: list[PullOrder]
    timeout_s: float  # of each pull


class PullTimes(BenchMessage, frozen=True):
    """Measured seconds, one of each kind per pull."""

    pull_s: list[float]
    pull_cpu_s: list[float]  # CPU time of the puller during its pulls
    memcpy_s: list[float]


Request = Serve | Issue | AskCpu | ConnectTo | Verify | Measure

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)

M = TypeVar("M")


class EndSocket:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def over(sock: socket.socket) -> EndSocket:
        """Open a conversation; takes ownership of the socket."""
        return EndSocket(*await asyncio.open_connection(sock=sock))

    async def send(self, message: BenchMessage) -> None:
        """Send a message. Raises ClusterError: the other process has ended."""
        body = msgspec.msgpack.encode(message)
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
        except OSError as error:
            raise ClusterError(f"the other process has ended: {error}") from error

    async def receive(self, kind: type[M]) -> M:
        """Receive the next message, which must be of this kind.

        Raises:
            ClusterError: the other process has ended, or sent something else.
        """
        return _decode(await self._receive_body(), msgspec.msgpack.Decoder(kind))

    async def receive_request(self) -> Request:
        """Receive the next message, which may be any request. Raises as `receive`."""
        return _decode(await self._receive_body(), _REQUESTS)

    async def _receive_body(self) -> bytes:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _MAX_BYTES:
                raise ClusterError(f"a message of {length} bytes exceeds the limit of {_MAX_BYTES}")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ClusterError("the other process has ended") from error

    async def close(self) -> None:
        """Close the socket, which ends the other end's `receive`. Idempotent."""
        self._writer.close()


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[M]) -> M:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ClusterError(f"the other process sent an unexpected message: {error}") from error
