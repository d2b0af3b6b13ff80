"""The messages between puller and exporter of a two-sided transport, besides the KV itself.

    puller   -> exporter   the access token, once per connection
    puller   -> exporter   PullRequest
    exporter -> puller     Verdict (num_bytes follow, or an error)
    exporter -> puller     the bytes, in the source's order; with a codec, chunks of them
    exporter -> puller     Verdict (valid, or stale)

A frame is a magic number, a length and a msgpack body. The length is bounded before the body is
read, so neither end has to buffer more than one frame of garbage, and the exporter nothing at all
before it has seen a valid token.
"""

from __future__ import annotations

import socket
import struct
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from kv_transfer.codecs.codec import RAW
from kv_transfer.handshake import ACCESS_BYTES
from kv_transfer.spans.box import KvBox
from kv_transfer.ticket import MAX_TICKET_BYTES
from kv_transfer.transports.interface import Read
from kv_transfer.transports.sockets import receive_exactly, send_all
from pdserve.shared.errors import (
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
_MAX_MESSAGE_CHARS = 1000  # of at most 4 bytes each: fits into a verdict


class GarbledFrame(PeerLost):
    """The other end violated this protocol."""


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Asks for a box (plan.KvBox) of the KV that the ticket names."""

    ticket: bytes
    begin: int
    end: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @staticmethod
    def of(read: Read) -> PullRequest:
        """The request for a planned read."""
        plain = PullRequest(read.sealed, *msgspec.structs.astuple(read.box))
        if read.sending is None or read.sending.codec == RAW:
            return plain  # as builds from before codecs understand it
        return CodedPullRequest(**msgspec.structs.asdict(plain), codec=read.sending.codec)

    @property
    def box(self) -> KvBox:
        """The requested box; it is not checked yet."""
        return KvBox(
            self.begin,
            self.end,
            self.first_layer,
            self.end_layer,
            self.first_head,
            self.end_head,
        )


class CodedPullRequest(PullRequest, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Any request; with a codec, its bytes are to be sent so (codecs/chunks.py)."""

    codec: str = RAW


class PullVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The result of a pull so far; an empty code means success."""

    num_bytes: int = 0  # number of bytes that follow, before any codec
    code: str = ""
    message: str = ""

    @staticmethod
    def of(error: PdserveError) -> PullVerdict:
        """The verdict that reports an error, instead of the bytes or after them."""
        return PullVerdict(code=error.code, message=error.message[:_MAX_MESSAGE_CHARS])

    def check(self) -> None:
        """Raise the error that the exporter reported: a TransferError or StaleIncarnation."""
        if not self.code:
            return
        error = from_code(self.code, self.message)
        if isinstance(error, TransferError | StaleIncarnation):
            raise error
        raise TransferError(f"the exporter reported {self.code}: {self.message}")


_Frame = TypeVar("_Frame", bound=msgspec.Struct)


async def send_frame(sock: socket.socket, frame: msgspec.Struct) -> None:
    """Send one frame. Raises OSError: the connection broke."""
    await send_all(sock, frame_bytes(frame))


def first_frame(said: bytes, kind: type[_Frame]) -> tuple[_Frame, int] | None:
    """The frame that `said` begins with, and its bytes; None: something else, or only a part."""
    if len(said) < _PREFIX.size:
        return None
    magic, length = _PREFIX.unpack_from(said)
    end = _PREFIX.size + length
    if magic != _MAGIC or end > len(said):
        return None
    try:
        return msgspec.msgpack.decode(memoryview(said)[_PREFIX.size : end], type=kind), end
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def frame_bytes(frame: msgspec.Struct) -> bytes:
    """A frame as it is sent."""
    body = msgspec.msgpack.encode(frame)
    return _PREFIX.pack(_MAGIC, len(body)) + body


async def send_access(sock: socket.socket, token: bytes) -> None:
    """Send the access token, as the first message. Raises OSError: the connection broke."""
    await send_all(sock, _MAGIC + token)


async def receive_access(sock: socket.socket) -> bytes:
    """Receive the access token; it is not checked yet.

    Raises:
        GarbledFrame: something else was received, or only a part of it.
        PeerLost: the connection was closed.
        OSError: the connection broke.
    """
    said = await receive_exactly(sock, len(_MAGIC) + ACCESS_BYTES)
    if not said:
        raise PeerLost("the other end closed the connection")
    if not said.startswith(_MAGIC) or len(said) < len(_MAGIC) + ACCESS_BYTES:
        raise GarbledFrame(f"received {said[:8]!r} instead of an access token")
    return said[len(_MAGIC) :]


async def receive_frame(
    sock: socket.socket, kind: type[_Frame], max_bytes: int, begun: bytes = b""
) -> _Frame:
    """Receive the next frame, or the rest of one; `begun` has its prefix then.

    Raises:
        GarbledFrame: something else was received, or only a part of it.
        PeerLost: the connection was closed.
        OSError: the connection broke.
    """
    begun = begun or await receive_exactly(sock, _PREFIX.size)
    prefix, begun = begun[: _PREFIX.size], begun[_PREFIX.size :]
    if not prefix:
        raise PeerLost("the other end closed the connection")
    if len(prefix) < _PREFIX.size:
        raise GarbledFrame(f"received {prefix!r} instead of a frame")
    magic, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > max_bytes:
        raise GarbledFrame(f"received {prefix!r} instead of a frame of at most {max_bytes} bytes")
    body = begun + await receive_exactly(sock, length - len(begun))
    if len(body) < length:
        raise GarbledFrame(f"received {len(body)} bytes of a frame of {length}")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GarbledFrame(f"received a frame that is no {kind.__name__}: {error}") from error


VALID: Final = frame_bytes(PullVerdict())  # the last word of a pull without errors


@lru_cache(64)
def first_verdict(num_bytes: int) -> bytes:
    """The first word of a pull of so many bytes without errors: pulls are often of equal size."""
    return frame_bytes(PullVerdict(num_bytes=num_bytes))
