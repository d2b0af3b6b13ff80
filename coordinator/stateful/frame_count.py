"""Counts a WebSocket's frames from their heads, before anything is made of them.

A frame may have six bytes, and each becomes an object in the same turn of the event loop.
"""

from __future__ import annotations

MAX_FRAGMENTS = 4096  # of one message
MAX_UNREAD = 256  # messages, pings and pongs
_LENGTH_BYTES = {126: 2, 127: 8}  # of a length that its first byte stands for
_MASK_BYTES = 4
_CONTROL = 0x8


class FrameCount:
    """The frames of one connection that have begun to arrive."""

    def __init__(self) -> None:
        self._num_fragments = self._num_unread = 0
        self._skip = 0  # bytes of the latest frame that are still to come
        self._head = b""  # the beginning of a frame's head

    def add(self, data: bytes) -> bool:
        """Count what begins in the next bytes; False as soon as it is too much."""
        data, at = self._head + data, 0
        while True:
            step = min(self._skip, len(data) - at)
            at += step
            self._skip -= step
            if self._skip or (end := _head_end(data, at)) > len(data):
                self._head = data[at:]
                return True
            first, second = data[at], data[at + 1]
            long = data[at + 2 : at + 2 + _LENGTH_BYTES.get(second & 0x7F, 0)]
            self._skip = int.from_bytes(long, "big") if long else second & 0x7F
            at = end
            if not self._count(is_last=first >= 0x80, is_control=bool(first & _CONTROL)):
                return False

    def read(self) -> None:
        """Note that a message, a ping or a pong has been read."""
        self._num_unread -= 1

    def _count(self, *, is_last: bool, is_control: bool) -> bool:
        if not is_control:
            self._num_fragments = 0 if is_last else self._num_fragments + 1
        self._num_unread += is_last
        return self._num_fragments < MAX_FRAGMENTS and self._num_unread <= MAX_UNREAD


def _head_end(data: bytes, at: int) -> int:
    """Return where the head of the frame at `at` ends, or beyond the end while that is unknown."""
    if len(data) < at + 2:
        return len(data) + 1
    second = data[at + 1]
    return at + 2 + _LENGTH_BYTES.get(second & 0x7F, 0) + _MASK_BYTES * (second >> 7)
