"""The few bytes that TCP puller and exporter say to each other besides the KV.

    puller   -> exporter   PullRequest
    exporter -> puller     Verdict (go ahead, num_bytes follow | why not)
    exporter -> puller     the bytes, in the source's order
    exporter -> puller     Verdict (valid to the end | stale)

A frame is a magic number, a length and a msgpack body. Lengths are bounded before anything is
read, so neither end can be made to hold more than one frame of garbage.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from kv_transfer.ticket import MAX_TICKET_BYTES
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
MAX_REQUEST_BYTES = MAX_TICKET_BYTES + 64
MAX_VERDICT_BYTES = 4096
_MAX_MESSAGE_CHARS = 1000  # at most 4 bytes each: fits a verdict


class GarbledFrame(PeerLost):
    """The other end does not speak this protocol."""


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Send me tokens [begin, end) of the ticket's range."""

    ticket: bytes
    begin: int
    end: int


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


_Frame = TypeVar("_Frame", PullRequest, Verdict)


async def send_frame(sock: socket.socket, frame: PullRequest | Verdict) -> None:
    """Raises OSError when the connection broke."""
    body = msgspec.msgpack.encode(frame)
    await asyncio.get_running_loop().sock_sendall(sock, _PREFIX.pack(_MAGIC, len(body)) + body)


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
