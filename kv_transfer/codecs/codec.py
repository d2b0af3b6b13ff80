"""What a codec of KV does, chunk by chunk."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

RAW: Final = ""  # the name of no codec


class Codec(Protocol):
    """Codes chunks of whole rows, each by itself. Called in threads, several at the same time."""

    def encode(self, chunk: Bytes) -> list[Bytes | bytes]:
        """The pieces of what is sent for a chunk; at most `max_coded_bytes` in all."""
        ...

    def sample(self, num_bytes: int) -> Bytes:
        """About so many bytes of which coding takes as long as of KV."""
        ...

    def decode(self, coded: Bytes, chunk: Bytes) -> None:
        """Write to `chunk` the bytes that were coded.

        Raises:
            CorruptTransfer: this is not what `encode` makes of a chunk of that size.
        """
        ...


def max_coded_bytes(num_bytes: int) -> int:
    """The most that is sent for a chunk of so many bytes."""
    return num_bytes + num_bytes // 128 + 256
