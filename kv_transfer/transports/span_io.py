"""Moves the bytes of spans over a socket: natively over plain TCP, by OpenSSL with TLS.

Both return the position that was reached when a slice is over, when they are cancelled, or when the
peer is not ready for a few milliseconds. A slice of 0 never waits.

OpenSSL reads and writes the pool itself, and without the interpreter lock. It takes many records of
16 KiB at a time to send, but gives one at a time.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag
from pdserve import _native

_RECORD_BYTES = 16 << 10  # the most that a record has
_WRITE_BYTES = 16 * _RECORD_BYTES  # at once, between looks at the cancel flag
_MAX_SPANS = 512  # of one call: it makes a list of them
_PATIENCE_MS = 5


def send_spans(
    sock: socket.socket,
    pool: NDArray[np.uint8],
    spans: Spans,
    position: int,
    cancel: CancelFlag,
    slice_s: float,
) -> int:
    """Send the bytes of `spans` [n, 2] (offset, nbytes) from stream position `position` on.

    Returns the position reached; that may be only a part of the way.

    Raises:
        OSError: the connection broke.
    """
    if not isinstance(sock, ssl.SSLSocket):
        return _native.send_spans(sock.fileno(), pool, spans, position, cancel.byte, slice_s)
    left = _Left(pool, spans, position)
    # What has to be tried again is at least as much again, as OpenSSL wants it.
    return position + _move(sock, lambda: sock.send(left.record()), left, cancel, slice_s)


def receive_spans(
    sock: socket.socket,
    pool: NDArray[np.uint8],
    spans: Spans,
    position: int,
    cancel: CancelFlag,
    slice_s: float,
) -> int:
    """Receive the bytes of `spans`; otherwise as `send_spans`."""
    if not isinstance(sock, ssl.SSLSocket):
        return _native.recv_spans(sock.fileno(), pool, spans, position, cancel.byte, slice_s)
    left = _Left(pool, spans, position)
    return position + _move(sock, lambda: sock.recv_into(left.first()), left, cancel, slice_s)


class _Left:
    """What is left of the spans from a position on, as far as one call goes."""

    def __init__(self, pool: NDArray[np.uint8], spans: Spans, position: int) -> None:
        ends = np.cumsum(spans[:, 1])
        index = int(np.searchsorted(ends, position, side="right"))
        rows = spans[index : index + _MAX_SPANS]
        self._view = pool.data
        self._begins: list[int] = rows[:, 0].tolist()
        self._ends: list[int] = rows.sum(axis=1).tolist()
        self._index = 0
        if self:
            self._begins[0] = self._ends[0] - (int(ends[index]) - position)

    def __bool__(self) -> bool:
        return self._index < len(self._ends)

    def first(self) -> memoryview:
        """What is left of the first span."""
        return self._view[self._begins[self._index] : self._ends[self._index]]

    def record(self) -> memoryview | bytes:
        """What to send next: of one span, or several spans that fill a record."""
        if len(first := self.first()) >= _RECORD_BYTES:
            return first[:_WRITE_BYTES]
        pieces, missing = [first], _RECORD_BYTES - len(first)
        for index in range(self._index + 1, len(self._ends)):
            begin, end = self._begins[index], self._ends[index]
            pieces.append(self._view[begin : min(end, begin + missing)])
            missing -= len(pieces[-1])
            if not missing:
                break
        return b"".join(pieces)

    def advance(self, num_bytes: int) -> None:
        """So many bytes have been moved."""
        while num_bytes:
            moved = min(num_bytes, self._ends[self._index] - self._begins[self._index])
            self._begins[self._index] += moved
            num_bytes -= moved
            if self._begins[self._index] == self._ends[self._index]:
                self._index += 1


def _move(
    sock: ssl.SSLSocket,
    move: Callable[[], int],
    left: _Left,
    cancel: CancelFlag,
    slice_s: float,
) -> int:
    """Call `move`, which moves some of the bytes that are left, until something ends the slice.

    Returns the number of bytes moved.
    """
    total, slice_end_s = 0, time.monotonic() + slice_s
    while left and not cancel.byte[0]:
        try:
            moved = move()
        except ssl.SSLWantReadError:
            if not (slice_s and _is_ready(sock, select.POLLIN)):
                break
        except ssl.SSLWantWriteError:
            if not (slice_s and _is_ready(sock, select.POLLOUT)):
                break
        else:
            if not moved:
                raise ConnectionResetError("the peer has closed its end")
            left.advance(moved)
            total += moved
        if slice_s and time.monotonic() > slice_end_s:
            break
    return total


def _is_ready(sock: ssl.SSLSocket, event: int) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(_PATIENCE_MS))
