"""What is sent of a read with a codec: chunks, coded one by one, so that one is coded while others
are on their way.

    chunk   bytes of the pool (uint32), bytes that follow (uint32), what the codec made of them

Chunks are in the read's order, and each ends with a whole row. All but the last are large: who
receives them does so on its event loop, and decodes each in a thread.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from kv_transfer.codecs.codec import Bytes, Codec, max_coded_bytes
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag
from pdserve import _native
from pdserve.kv import KvLayout
from pdserve.shared.errors import PeerLost

HEAD: Final = struct.Struct("!II")
_CHUNK_BYTES: Final = 1 << 20
_LEAST_BYTES: Final = _CHUNK_BYTES // 2  # of a chunk that is not the last
# Coding takes ten times as long as copying: what a thread is woken for begins at fewer bytes.
CODING_COSTS: Final = 10


class Encoder:
    """Codes spans [n, 2] (offset, nbytes) of a pool, chunk by chunk."""

    def __init__(self, codec: Codec, pool: Bytes, spans: Spans, layout: KvLayout) -> None:
        self._codec = codec
        self._pool = pool
        self._cursor = _Cursor(spans)
        row = layout.planes[0].row_bytes
        self._chunk_bytes = max(1, _CHUNK_BYTES // row) * row

    @property
    def next_bytes(self) -> int:
        """Bytes of the pool in the next chunk; 0: there are no more."""
        return min(self._chunk_bytes, self._cursor.left)

    def next(self) -> Bytes:
        """The next chunk, as it is sent. May be called in a thread."""
        size = self.next_bytes
        spans = self._cursor.take(size)
        chunk = _in_place(self._pool, spans)
        if chunk is None:
            chunk = np.empty(size, dtype=np.uint8)
            _native.copy_spans(chunk, self._pool, spans, CancelFlag().byte)
        pieces = [np.frombuffer(piece, dtype=np.uint8) for piece in self._codec.encode(chunk)]
        head = HEAD.pack(size, sum(map(len, pieces)))
        return np.concatenate([np.frombuffer(head, dtype=np.uint8), *pieces])


class Decoder:
    """Decodes chunks into spans [n, 2] (offset, nbytes) of a pool."""

    def __init__(self, codec: Codec, pool: Bytes, spans: Spans) -> None:
        self._codec = codec
        self._pool = pool
        self._cursor = _Cursor(spans)

    @property
    def is_over(self) -> bool:
        """Whether all spans are filled."""
        return not self._cursor.left

    def check(self, head: bytes) -> tuple[int, int]:
        """Read the head of the next chunk: (its bytes, bytes that follow).

        Raises:
            PeerLost: there is no such chunk.
        """
        if len(head) < HEAD.size:
            raise PeerLost("the other end closed the connection between two chunks")
        size, coded = HEAD.unpack(head)
        left = self._cursor.left
        least, most = min(left, _LEAST_BYTES), min(left, 2 * _CHUNK_BYTES)
        if not least <= size <= most or coded > max_coded_bytes(size):
            raise PeerLost(f"received a chunk of {size} bytes as {coded}, where {left} are left")
        return size, coded

    def write(self, size: int, coded: Bytes) -> None:
        """Decode the next chunk, of so many bytes. May be called in a thread.

        Raises:
            CorruptTransfer: it cannot be decoded.
        """
        spans = self._cursor.take(size)
        chunk = _in_place(self._pool, spans)
        if chunk is not None:
            self._codec.decode(coded, chunk)
            return
        chunk = np.empty(size, dtype=np.uint8)
        self._codec.decode(coded, chunk)
        back = np.ascontiguousarray(spans[:, [1, 0, 2]])
        _native.copy_spans(self._pool, chunk, back, CancelFlag().byte)


class _Cursor:
    """Goes through spans [n, 2] (offset, nbytes)."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._ends = np.cumsum(spans[:, 1])
        self._position = 0
        self.left = int(self._ends[-1]) if len(spans) else 0

    def take(self, num_bytes: int) -> Spans:
        """The spans of the next bytes: [n, 3] (offset, place among these bytes, nbytes)."""
        begin, end = self._position, self._position + num_bytes
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        ends = np.minimum(self._ends[first : last + 1], end)
        begins = np.maximum(ends - self._spans[first : last + 1, 1], begin)
        begins[1:] = ends[:-1]
        skipped = begins - (self._ends[first : last + 1] - self._spans[first : last + 1, 1])
        offsets = self._spans[first : last + 1, 0] + skipped
        self._position, self.left = end, self.left - num_bytes
        return np.stack([offsets, begins - begin, ends - begins], axis=1)


def _in_place(pool: Bytes, spans: Spans) -> Bytes | None:
    """The bytes themselves, if they are next to each other."""
    if len(spans) > 1:
        return None
    offset, _, nbytes = spans[0].tolist()
    return pool[offset : offset + nbytes]
