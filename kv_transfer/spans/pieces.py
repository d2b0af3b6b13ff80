"""Pure arithmetic: cuts spans into pieces of limited size, and a stream into chunks."""

from __future__ import annotations

from typing import Final

import numpy as np

from kv_transfer.spans.plan import Spans

# Copied by one warp: long enough that starting it costs little, short enough that a block of 1 MiB
# keeps many warps busy. A multiple of 16, so that cutting preserves alignment.
PIECE_BYTES: Final = 16 << 10


def cut_pieces(spans: Spans, max_bytes: int = PIECE_BYTES) -> Spans:
    """The same copies in pieces of at most `max_bytes`, without empty ones.

    Spans are int64 [n, 3] (source offset, destination offset, nbytes).
    """
    counts = -(-spans[:, 2] // max_bytes)
    firsts = np.cumsum(counts) - counts
    done = (np.arange(counts.sum()) - np.repeat(firsts, counts)) * max_bytes
    pieces = np.repeat(spans, counts, axis=0)
    pieces[:, :2] += done[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - done, max_bytes)
    return pieces


def cut_batches(spans: Spans, max_count: int, max_bytes: int) -> list[Spans]:
    """The same copies in batches of at most `max_count` of them, and of at most `max_bytes`.

    Spans are as in `cut_pieces`; larger ones are cut.
    """
    pieces = cut_pieces(spans, max_bytes)
    ends = np.cumsum(pieces[:, 2])
    batches = []
    first = done = 0
    while first < len(pieces):
        last = int(np.searchsorted(ends, done + max_bytes, side="right"))
        end = min(last, first + max_count)
        batches.append(pieces[first:end])
        first, done = end, int(ends[end - 1])
    return batches


def cut_chunks(ranges: Spans, chunk_bytes: int) -> list[Spans]:
    """Cut the concatenation of these ranges of a pool into chunks of `chunk_bytes`.

    Ranges are int64 [n, 2] (offset, nbytes). Each chunk is int64 [m, 3]: (offset in the pool,
    offset in the chunk, nbytes); all but the last are full.
    """
    ranges = ranges[ranges[:, 1] > 0]
    ends = np.cumsum(ranges[:, 1])
    if not len(ends):
        return []
    starts = ends - ranges[:, 1]
    borders = np.arange(0, ends[-1], chunk_bytes)
    begins = np.union1d(starts, borders)
    owners = np.searchsorted(ends, begins, side="right")
    offsets = ranges[owners, 0] + begins - starts[owners]
    lengths = np.diff(begins, append=ends[-1])
    table = np.stack([offsets, begins % chunk_bytes, lengths], axis=1)
    return np.split(table, np.searchsorted(begins, borders[1:]))
