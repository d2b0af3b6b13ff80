"""Writes a file in pieces that its page cache holds in huge pages: 2 MiB at multiples of 2 MiB."""

from __future__ import annotations

import os

PIECE_BYTES = 2 << 20


class HugeWriter:
    """Appends to an empty file. What has been given to it is in the file after `flush`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._piece = memoryview(bytearray(PIECE_BYTES))  # the one that is not full yet
        self._num_bytes = 0  # in it
        self._written = 0  # bytes of whole pieces

    def tell(self) -> int:
        """Bytes so far."""
        return self._written + self._num_bytes

    def pad(self, multiple: int) -> None:
        """Append zeros up to a multiple of so many bytes."""
        self.write(memoryview(bytes(-self.tell() % multiple)))

    def write(self, data: memoryview) -> None:
        """Append bytes; whole pieces go from where they are.

        Raises:
            OSError: there is no room.
        """
        while data:
            if self._num_bytes == 0 and len(data) >= PIECE_BYTES:
                self._append(data[:PIECE_BYTES])
                data = data[PIECE_BYTES:]
                continue
            size = min(len(data), PIECE_BYTES - self._num_bytes)
            self._piece[self._num_bytes : self._num_bytes + size] = data[:size]
            self._num_bytes += size
            data = data[size:]
            if self._num_bytes == PIECE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is left; the last thing to do.

        Raises:
            OSError: there is no room.
        """
        self._append(self._piece[: self._num_bytes])
        self._num_bytes = 0

    def _append(self, data: memoryview) -> None:
        while data:
            size = os.write(self._fd, data)
            self._written += size
            data = data[size:]
