"""The few bytes that puller and exporter of a two-sided transport say besides the KV.

    puller   -> exporter   the access token, once a connection
    puller   -> exporter   PullRequest
    exporter -> puller     Verdict (go ahead, num_bytes follow | why not)
    exporter -> puller     the bytes, in the source's order
    exporter -> puller     Verdict (valid to the end | stale)

A frame is a magic number, a length and a msgpack body. Lengths are bounded before anything is
read, so neither end can be made to hold more than one frame of garbage; and who has no token, not
even that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import asdict
from typing import TypeVar

import msgspec

from kv_transfer.access import ACCESS_BYTES
from kv_transfer.plan import KvBox
from kv_transfer.ticket import MAX_TICKET_BYTES
from kv_transfer.transports.interface import Read
from kv_transfer.transports.sockets import receive_exactly
from pdserve.errors import (
    PdserveError,
    PeerLost,
    StaleIncarnation,
    TransferError,
    from_code,
)

_PREFIX = struct.Struct("!4sI")
_MAGIC = b"pdKV"
MAX_REQUEST_BYTES = MAX_TICKET_BYTES + 128
MAX_VERDICT_BYTES = 4096
_MAX_MESSAGE_CHARS = 1000  # at most 4 bytes each: fits a verdict


class GarbledFrame(PeerLost):
    """The other end does not speak this protocol."""


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Send me this box (plan.KvBox) of what the ticket names."""

    ticket: bytes
    begin: int
    end: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @staticmethod
    def of(read: Read) -> PullRequest:
        """What the puller asks for."""
        return PullRequest(read.sealed, **asdict(read.box))

    @property
    def box(self) -> KvBox:
        """What is asked for; not checked against anything."""
        return KvBox(
            self.begin,
            self.end,
            self.first_layer,
            self.end_layer,
            self.first_head,
            self.end_head,
        )


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How it stands; an empty code means well."""

    num_bytes: int = 0  # that follow
    code: str = ""
    message: str = ""

    @staticmethod
    def of(error: PdserveError) -> Verdict:
        """What the exporter answers instead of bytes, or after them."""
        return Verdict(code=error.code, message=error.message[:_MAX_MESSAGE_CHARS])

    def check(self) -> None:
        """Raises what the exporter reported: a TransferError or StaleIncarnation."""
        if not self.code:
            return
        error = from_code(self.code, self.message)
        if isinstance(error, TransferError | StaleIncarnation):
            raise error
        raise TransferError(f"the exporter reported {self.code}: {self.message}")


_Frame = TypeVar("_Frame", bound=msgspec.Struct)


async def send_frame(sock: socket.socket, frame: msgspec.Struct) -> None:
    """Raises OSError when the connection broke."""
    body = msgspec.msgpack.encode(frame)
    await asyncio.get_running_loop().sock_sendall(sock, _PREFIX.pack(_MAGIC, len(body)) + body)


async def send_access(sock: socket.socket, token: bytes) -> None:
    """The first thing a puller says. Raises OSError when the connection broke."""
    await asyncio.get_running_loop().sock_sendall(sock, _MAGIC + token)


async def receive_access(sock: socket.socket) -> bytes:
    """The first thing a puller says; not checked yet.

    Raises:
        GarbledFrame: it is something else, or only a part of it.
        PeerLost: nothing was said.
        OSError: the connection broke.
    """
    said = await receive_exactly(sock, len(_MAGIC) + ACCESS_BYTES)
    if not said:
        raise PeerLost("the other end closed the connection")
    if not said.startswith(_MAGIC) or len(said) < len(_MAGIC) + ACCESS_BYTES:
        raise GarbledFrame(f"received {said[:8]!r} instead of an access token")
    return said[len(_MAGIC) :]


async def receive_frame(sock: socket.socket, kind: type[_Frame], max_bytes: int) -> _Frame:
    """The next frame.

    Raises:
        GarbledFrame: what came is not one, or only a part of one.
        PeerLost: the stream ended before it.
        OSError: the connection broke.
    """
    prefix = await receive_exactly(sock, _PREFIX.size)
    if not prefix:
        raise PeerLost("the other end closed the connection")
    if len(prefix) < _PREFIX.size:
        raise GarbledFrame(f"received {prefix!r} instead of a frame")
    magic, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > max_bytes:
        raise GarbledFrame(f"received {prefix!r} instead of a frame of at most {max_bytes} bytes")
    body = await receive_exactly(sock, length)
    if len(body) < length:
        raise GarbledFrame(f"received {len(body)} bytes of a frame of {length}")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GarbledFrame(f"received a frame that is no {kind.__name__}: {error}") from error
