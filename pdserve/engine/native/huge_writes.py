"""Writes a file in aligned pieces of 2 MiB, so that the page cache holds it in huge pages."""

from __future__ import annotations

import os

PIECE_BYTES = 2 << 20


class HugeWriter:
    """Appends to an empty file, buffered. All data is in the file after `flush`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._piece = memoryview(bytearray(PIECE_BYTES))  # buffer for an incomplete piece
        self._num_bytes = 0  # number of bytes in the buffer
        self._written = 0  # number of bytes written to the file

    def tell(self) -> int:
        """Return the number of bytes appended so far."""
        return self._written + self._num_bytes

    def pad(self, multiple: int) -> None:
        """Append zeros up to a multiple of this many bytes."""
        self.write(memoryview(bytes(-self.tell() % multiple)))

    def write(self, data: memoryview) -> None:
        """Append bytes. Whole pieces are written without being copied into the buffer.

        Raises:
            OSError: writing failed, such as for lack of disk space.
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
        """Write the rest of the buffer; to be called last.

        Raises:
            OSError: writing failed, such as for lack of disk space.
        """
        self._append(self._piece[: self._num_bytes])
        self._num_bytes = 0

    def _append(self, data: memoryview) -> None:
        while data:
            size = os.write(self._fd, data)
            self._written += size
            data = data[size:]
