"""Pure arithmetic: two layouts, block ids and a token range |-> the spans of bytes to copy.

    source blocks       |  b7   |  b2   |  b9   |      block_size 4
    tokens               0 1 2 3 4 5 6 7 8 9 ...       [begin, end) = what is wanted
    destination blocks  |     b30       |     b31      block_size 8

The range is cut at every block border of either side into token runs. Inside a block, K and V of a
layer are head-major, so a run is one span per *row* (layer, K or V, head) - except where it fills
a block on both sides: then the block moves whole. Neighbouring spans are joined at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import LayoutMismatch
from pdserve.kv_layout import KvLayout

Spans = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one request in one pool.

    `block_ids[i]` holds the tokens from `(first_block + i) * layout.block_size` on.
    """

    layout: KvLayout
    block_ids: NDArray[np.int64]
    first_block: int = 0

    def check_covers(self, begin: int, end: int) -> None:
        """Raises ValueError unless the blocks hold all of tokens [begin, end)."""
        first = self.first_block * self.layout.block_size
        last = first + len(self.block_ids) * self.layout.block_size
        if begin < first or end > last:
            raise ValueError(f"tokens {begin}..{end} are not all in blocks for {first}..{last}")


def check_compatible(source: KvLayout, destination: KvLayout) -> None:
    """That KV of one layout can be re-laid out as the other; block sizes may differ.

    Raises:
        LayoutMismatch: with both layouts.
    """
    if _row_shape(source) != _row_shape(destination):
        raise LayoutMismatch(
            f"KV of ({source.describe()}) cannot be laid out as ({destination.describe()})"
        )


def plan_spans(source: BlockRun, destination: BlockRun, begin: int, end: int) -> Spans:
    """Spans that copy tokens [begin, end) from `source` to `destination`.

    Returns int64 [n, 3]: (source_offset, destination_offset, nbytes), offsets from the start of
    each pool. The spans ascend in the source: block by block as the run lists them, then by offset.
    So an exporter that streams `source_ranges` of the same tokens sends just these bytes in just
    this order, whatever the destination's layout is.

    Raises:
        LayoutMismatch: as check_compatible.
        ValueError: a run does not cover the range.
    """
    check_compatible(source.layout, destination.layout)
    if begin >= end:
        return np.empty((0, 3), dtype=np.int64)
    source.check_covers(begin, end)
    destination.check_covers(begin, end)
    starts, lengths = _token_runs(
        begin, end, source.layout.block_size, destination.layout.block_size
    )
    whole = (lengths == source.layout.block_size) & (lengths == destination.layout.block_size)
    order, from_block, from_slot = _locate(source, starts)
    _, to_block, to_slot = _locate(destination, starts)
    rows = _rows_of(source.layout)
    row_bytes = _slot_bytes(source.layout)
    part = ~whole
    # [num_partial_runs, num_rows]
    from_row = rows * source.layout.head_bytes + (from_slot * row_bytes)[part, None]
    to_row = rows * destination.layout.head_bytes + (to_slot * row_bytes)[part, None]
    nbytes = np.broadcast_to((lengths * row_bytes)[part, None], from_row.shape)
    position = np.concatenate([order[whole], (order[part, None] + from_row).ravel()])
    spans = np.column_stack(
        [
            np.concatenate([from_block[whole], (from_block[part, None] + from_row).ravel()]),
            np.concatenate([to_block[whole], (to_block[part, None] + to_row).ravel()]),
            np.concatenate([lengths[whole] * source.layout.token_bytes, nbytes.ravel()]),
        ]
    )
    return _coalesce(spans[np.argsort(position, kind="stable")])


def source_ranges(source: BlockRun, begin: int, end: int) -> Spans:
    """Where the bytes of tokens [begin, end) lie, in stream order: int64 [n, 2], (offset, nbytes).

    Raises:
        ValueError: the run does not cover the range.
    """
    return np.ascontiguousarray(plan_spans(source, source, begin, end)[:, [0, 2]])


def _token_runs(
    begin: int, end: int, source_block: int, destination_block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(start, length) of the longest runs of tokens that cross no block border of either side."""
    borders = [
        np.arange(begin // size + 1, -(-end // size), dtype=np.int64) * size
        for size in {source_block, destination_block}
    ]
    cuts = np.sort(np.concatenate([np.array([begin, end], dtype=np.int64), *borders]))
    lengths = np.diff(cuts)
    return cuts[:-1][lengths > 0], lengths[lengths > 0]  # borders of both sides come twice


def _locate(
    run: BlockRun, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For each token: (rank of its block in the run, in bytes; the block's offset; its slot)."""
    rank = tokens // run.layout.block_size - run.first_block
    block_bytes = run.layout.block_bytes
    return rank * block_bytes, run.block_ids[rank] * block_bytes, tokens % run.layout.block_size


def _row_shape(layout: KvLayout) -> tuple[int, int, int, str]:
    return (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype)


def _rows_of(layout: KvLayout) -> NDArray[np.int64]:
    """0..num_rows, a row being one (layer, K or V, head) of a block."""
    return np.arange(layout.num_layers * 2 * layout.num_kv_heads, dtype=np.int64)


def _slot_bytes(layout: KvLayout) -> int:
    """Bytes of one token in one row."""
    return layout.head_dim * layout.dtype.itemsize


def _coalesce(spans: Spans) -> Spans:
    ends = spans[:-1, :2] + spans[:-1, 2:]
    is_first = np.concatenate([[True], (ends != spans[1:, :2]).any(axis=1)])
    firsts = np.flatnonzero(is_first)
    joined = spans[firsts]
    joined[:, 2] = np.add.reduceat(spans[:, 2], firsts)
    return joined
