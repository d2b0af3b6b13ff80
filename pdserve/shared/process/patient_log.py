"""A log that is written as long as somebody takes it, and that nobody waits for.

Who reads a pipe may stop, a terminal may be held, a disk may be full. A process that waited for
them would stand still with all its requests.
"""

from __future__ import annotations

import os
import select
from typing import Final

MOST_BYTES: Final = 1 << 20  # that are kept meanwhile
_AT_ONCE: Final = select.PIPE_BUF  # what a pipe takes without waiting if it takes anything


class PatientLog:
    """A descriptor as a stream for lines, one thread at a time (as logging's handlers write)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = bytearray()
        self._num_lost = 0  # lines, since anything was written
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, lines: str) -> None:
        """Write them now or later, after those before; too many are counted, and the count told."""
        self.flush()
        encoded = lines.encode(errors="backslashreplace")
        if self._kept and len(self._kept) + len(encoded) > MOST_BYTES:
            self._num_lost += lines.count("\n")
            return
        self._kept += encoded
        self.flush()

    def flush(self) -> None:
        """Write of what is kept as much as is taken now."""
        while self._kept and self._poll.poll(0):
            try:
                num_written = os.write(self._fd, self._kept[:_AT_ONCE])
            except OSError:  # a full disk, or nobody will ever read it
                return
            del self._kept[:num_written]
            if not self._kept and self._num_lost:
                told = f"pdserve: {self._num_lost} lines of the log were lost: nobody took them\n"
                self._kept += told.encode()
                self._num_lost = 0
