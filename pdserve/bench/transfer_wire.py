"""What the transfer benchmark says to its two processes: a request, and always one reply.

A message is its length and a msgpack body. Both ends are ours, and nobody else has the socket.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from pdserve.errors import ClusterError
from pdserve.protocol import ExporterWelcome

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 256 << 20


class BenchMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of every message here."""


class Ready(BenchMessage, frozen=True):
    """The first word of either end: its pools are filled."""

    has_huge_pages: bool


# ---- to the exporter -----------------------------------------------------------------------------


class Serve(BenchMessage, frozen=True):
    """Serve the pool by this transport, and by no other any more."""

    transport: str
    host: str  # address to listen on


class Served(BenchMessage, frozen=True):
    """How it can be pulled from, or why it cannot."""

    welcome: ExporterWelcome | None
    obstacle: str = ""


class Issue(BenchMessage, frozen=True):
    """Issue one ticket for each of these lists of blocks."""

    block_ids: list[list[int]]


class Issued(BenchMessage, frozen=True):
    """The tickets, in the same order."""

    tickets: list[bytes]


class AskCpu(BenchMessage, frozen=True):
    """How much processor time has the process used?"""


class Cpu(BenchMessage, frozen=True):
    """User and system time of all threads since its start, seconds."""

    used_s: float


# ---- to the puller -------------------------------------------------------------------------------


class Connect(BenchMessage, frozen=True):
    """Connect by this transport, and close the link by which blocks were pulled so far."""

    transport: str
    welcome: ExporterWelcome


class Connected(BenchMessage, frozen=True):
    """Whether it can be pulled by."""

    obstacle: str = ""


class PullOrder(msgspec.Struct, frozen=True):
    """One pull: a ticket for some blocks, and where they go."""

    ticket: bytes
    source_ids: list[int]  # what the ticket names; for the memcpy, which needs no ticket
    destination_ids: list[int]


class Verify(BenchMessage, frozen=True):
    """Pull into zeroed blocks, and compare every byte."""

    order: PullOrder
    timeout_s: float


class Verified(BenchMessage, frozen=True):
    """Every byte is as it is in the exporter."""


class Measure(BenchMessage, frozen=True):
    """Pull, one after the other, with a memcpy of the same blocks before or after each."""

    orders: list[PullOrder]
    timeout_s: float  # of each pull


class Measured(BenchMessage, frozen=True):
    """Seconds; one of each for every order."""

    pull_s: list[float]
    pull_cpu_s: list[float]  # the puller's processor time during its pulls
    memcpy_s: list[float]


Request = Serve | Issue | AskCpu | Connect | Verify | Measure

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)

M = TypeVar("M")


class Conversation:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def over(sock: socket.socket) -> Conversation:
        """Takes ownership of the socket."""
        return Conversation(*await asyncio.open_connection(sock=sock))

    async def send(self, message: BenchMessage) -> None:
        """Raises ClusterError: the other process has ended."""
        body = msgspec.msgpack.encode(message)
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
        except OSError as error:
            raise ClusterError(f"the other process has ended: {error}") from error

    async def receive(self, kind: type[M]) -> M:
        """The next message, which can only be of this kind.

        Raises:
            ClusterError: the other process has ended, or what it said is something else.
        """
        return _decode(await self._receive_body(), msgspec.msgpack.Decoder(kind))

    async def receive_request(self) -> Request:
        """The next message, which can be any request. Raises as `receive`."""
        return _decode(await self._receive_body(), _REQUESTS)

    async def _receive_body(self) -> bytes:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _MAX_BYTES:
                raise ClusterError(f"a message of {length} bytes is none of the benchmark's")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ClusterError("the other process has ended") from error

    async def close(self) -> None:
        """The other end's `receive` ends. Idempotent."""
        self._writer.close()


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[M]) -> M:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ClusterError(f"the other process said something else: {error}") from error
