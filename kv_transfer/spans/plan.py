"""Pure arithmetic: from two layouts, block ids and a box of KV to the byte spans to copy.

    source blocks       |  b7   |  b2   |  b9   |      block_size 4
    tokens               0 1 2 3 4 5 6 7 8 9 ...       a box: tokens x layers x KV heads
    destination blocks  |     b30       |     b31      block_size 8

The tokens are cut into *runs* at the block borders of both sides. Inside a block, the planes of a
layer are head-major, so a run is one span per *row* (layer, plane, head). If the run fills a block
on both sides, the rows of all heads are contiguous; if both sides have the same heads as well, so
are those of all layers, and the block is copied as a whole. Adjacent spans are joined at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.box import BlockRun, KvBox, Rows, check_compatible
from pdserve import _native
from pdserve.kv import KvLayout
from pdserve.shared.errors import LayoutMismatch

Spans = NDArray[np.int64]

_MAX_ROWS = 4 << 20  # per plan; planning this many takes about a second and 0.5 GiB
_PART_ROWS = 1 << 20  # per plan, if a box is split
_QUICK_ROWS = 8192  # planned in one or two milliseconds


def is_quick(source: KvLayout, destination: KvLayout, box: KvBox) -> bool:
    """Whether planning the box takes only a millisecond or two, as it does for whole blocks.

    Otherwise it should be done in a thread: with other block sizes, or only some of the heads,
    there is a row for each token run, layer and head.
    """
    return box.is_empty or _count_rows(source, destination, box) <= _QUICK_ROWS


def split_box(source: KvLayout, destination: KvLayout, box: KvBox) -> list[KvBox]:
    """Split the box by tokens into parts whose plans are not too large; usually just one.

    The parts meet at borders of the source's blocks, so that each block is validated once.
    """
    num_parts = -(-_count_rows(source, destination, box) // _PART_ROWS)
    if num_parts <= 1:
        return [box]
    size = source.block_size
    step = -(-(box.end - box.begin) // (num_parts * size)) * size
    borders = range(box.begin // size * size + step, box.end, step)
    cuts = [box.begin, *borders, box.end]
    return [msgspec.structs.replace(box, begin=begin, end=end) for begin, end in pairwise(cuts)]


def plan_spans(source: BlockRun, destination: BlockRun, box: KvBox) -> Spans:
    """The spans that copy a box from `source` to `destination`.

    Returns int64 [n, 3]: (source_offset, destination_offset, nbytes), offsets from the start of
    each pool. The spans are in the order of the source: block by block as in the run, then by
    offset. So an exporter that streams `source_ranges` of the same box sends the same bytes in the
    same order, without knowing the destination's layout.

    Raises:
        LayoutMismatch: as check_compatible, or the plan would have millions of rows.
        ValueError: a run does not cover the box.
    """
    is_whole = _moves_whole_blocks(source.layout, destination.layout, box)
    if not is_whole:
        check_compatible(source.layout, destination.layout)
    if box.is_empty:
        return np.empty((0, 3), dtype=np.int64)
    source.check_covers(box)
    destination.check_covers(box)
    if is_whole:
        return whole_blocks(source, destination, box)
    num_rows = _count_rows(source.layout, destination.layout, box)
    if num_rows > _MAX_ROWS:
        raise LayoutMismatch(
            f"copying tokens {box.begin}..{box.end} from ({source.layout.describe()}) to "
            f"({destination.layout.describe()}) takes {num_rows} single rows, more than "
            f"{_MAX_ROWS}: take fewer tokens at a time (split_box)"
        )
    if source.layout == destination.layout and box.num_heads == len(source.layout.heads):
        parts = cut_at_whole_blocks(source.layout.block_size, box)
        return _joined([_in_one_layout(source, destination, part) for part in parts])
    return _coalesce(_rows_of_runs(source, destination, box))


def source_ranges(source: BlockRun, box: KvBox) -> Spans:
    """Where the bytes of a box are, in stream order: int64 [n, 2], (offset, nbytes).

    Raises:
        LayoutMismatch: there would be millions of ranges.
        ValueError: the run does not cover the box.
    """
    return np.ascontiguousarray(plan_spans(source, source, box)[:, [0, 2]])


def token_runs(
    begin: int, end: int, source_block: int, destination_block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The maximal runs of tokens that cross no block border of either side: (starts, lengths)."""
    borders = [
        np.arange(begin // size + 1, -(-end // size), dtype=np.int64) * size
        for size in {source_block, destination_block}
    ]
    cuts = np.sort(np.concatenate([np.array([begin, end], dtype=np.int64), *borders]))
    lengths = np.diff(cuts)
    return cuts[:-1][lengths > 0], lengths[lengths > 0]  # common borders are in `cuts` twice


def _count_rows(source: KvLayout, destination: KvLayout, box: KvBox) -> int:
    """The number of spans of a plan before adjacent ones are joined, or a few more."""
    if _moves_whole_blocks(source, destination, box):
        return (box.end - box.begin) // source.block_size
    num_layers = box.end_layer - box.first_layer
    wide = num_layers * len(source.planes)
    narrow = wide * box.num_heads
    if source.block_size != destination.block_size:  # no run fills a block on both sides
        sizes = (source.block_size, destination.block_size)
        return (1 + sum(box.end // size - box.begin // size for size in sizes)) * narrow
    size = source.block_size
    same_heads = _have_just(box, source, destination)
    num_parts = (box.begin % size != 0) + (box.end % size != 0)
    num_whole = max(0, box.end // size - -(-box.begin // size))
    return num_parts * narrow + num_whole * (1 if same_heads else wide)


def _moves_whole_blocks(source: KvLayout, destination: KvLayout, box: KvBox) -> bool:
    """Whether the box consists of whole blocks of equal layouts: by far the most frequent case.

    The general code gives the same spans, but takes a tenth of a millisecond.
    """
    return (
        source == destination
        and _have_just(box, source)
        and box.begin % source.block_size == box.end % source.block_size == 0
    )


def _have_just(box: KvBox, *layouts: KvLayout) -> bool:
    """Whether these layouts have the box's heads, and no others."""
    return all(box.num_heads == len(layout.heads) for layout in layouts)


def whole_blocks(
    source: BlockRun, destination: BlockRun, box: KvBox, *, joins: bool = True
) -> Spans:
    """The spans of a box of whole blocks, of all heads, between runs of one layout."""
    layout = source.layout
    first, end = box.begin // layout.block_size, box.end // layout.block_size
    layer_bytes = layout.layer_bytes
    return _native.block_spans(
        source.block_ids[first - source.first_block : end - source.first_block],
        destination.block_ids[first - destination.first_block : end - destination.first_block],
        layout.num_layers * layer_bytes,
        (box.first_layer - layout.layers.start) * layer_bytes,
        (box.end_layer - box.first_layer) * layer_bytes,
        joins,
    )


def cut_at_whole_blocks(block_size: int, box: KvBox) -> list[KvBox]:
    """Its whole blocks, and what there is of a block before them and of one after them."""
    borders = (-(-box.begin // block_size) * block_size, box.end // block_size * block_size)
    cuts = sorted({box.begin, box.end, *(at for at in borders if box.begin < at < box.end)})
    return [msgspec.structs.replace(box, begin=begin, end=end) for begin, end in pairwise(cuts)]


def _in_one_layout(source: BlockRun, destination: BlockRun, box: KvBox) -> Spans:
    """The spans of whole blocks, or of part of a block, with all heads that both sides have."""
    layout = source.layout
    first_block, first_slot = divmod(box.begin, layout.block_size)
    if first_slot == box.end % layout.block_size == 0:
        return whole_blocks(source, destination, box)
    rows = Rows.of(layout, box)
    spans = np.empty((*rows.offsets.shape, 3), dtype=np.int64)
    for side, run in enumerate((source, destination)):
        begin = run.block_ids[first_block - run.first_block] * layout.block_bytes
        spans[..., side] = rows.offsets + first_slot * rows.slot_bytes + begin
    spans[..., 2] = (box.end - box.begin) * rows.slot_bytes
    return spans.reshape(-1, 3)


def _joined(pieces: Sequence[Spans]) -> Spans:
    """All spans, in order; the last one of a piece and the first of the next may become one."""
    if len(pieces) == 1:
        return pieces[0]
    for before, after in pairwise(pieces):
        nbytes = before[-1, 2]
        if (before[-1, :2] + nbytes == after[0, :2]).all():
            after[0] += (-nbytes, -nbytes, nbytes)
            before[-1, 2] = 0
    spans = np.concatenate(pieces)
    return spans[spans[:, 2] > 0]


def _rows_of_runs(source: BlockRun, destination: BlockRun, box: KvBox) -> Spans:
    """The spans of any box, row by row of each run of tokens, in the order of the source."""
    starts, lengths = token_runs(
        box.begin, box.end, source.layout.block_size, destination.layout.block_size
    )
    order, from_block, from_slot = _locate(source, starts)
    _, to_block, to_slot = _locate(destination, starts)
    fills = (lengths == source.layout.block_size) & (lengths == destination.layout.block_size)
    pieces = []
    for runs, rows in _groups(source.layout, destination.layout, box, fills):
        from_row = rows.source + from_slot[runs, None] * rows.slot_bytes
        to_row = rows.destination + to_slot[runs, None] * rows.slot_bytes
        nbytes = lengths[runs, None] * rows.token_bytes
        piece = (
            order[runs, None] + from_row,
            from_block[runs, None] + from_row,
            to_block[runs, None] + to_row,
            nbytes,
        )
        pieces.append(np.stack([column.ravel() for column in piece], axis=1))
    ordered = np.concatenate(pieces)
    return np.ascontiguousarray(ordered[np.argsort(ordered[:, 0], kind="stable"), 1:])


@dataclass(frozen=True, slots=True)
class _Copies:
    """What each run of a group copies: offsets in a block on both sides, and widths."""

    source: NDArray[np.int64]  # [num_copies]
    destination: NDArray[np.int64]  # [num_copies]
    token_bytes: NDArray[np.int64]  # [num_copies], of one token
    slot_bytes: NDArray[np.int64]  # [num_copies], between slots; 0 where rows are copied whole


def _groups(
    source: KvLayout, destination: KvLayout, box: KvBox, fills: NDArray[np.bool_]
) -> list[tuple[NDArray[np.bool_], _Copies]]:
    """Groups of runs: (mask of the runs, their copies). Runs that fill a block have wider ones."""
    ours, theirs = Rows.of(source, box), Rows.of(destination, box)
    each = np.broadcast_to(ours.slot_bytes, ours.offsets.shape)
    if _have_just(box, source, destination):
        whole = each.sum(keepdims=True)
        wide = _copies(ours.offsets[:1, :1, :1], theirs.offsets[:1, :1, :1], whole, 0 * whole)
    else:
        heads = each.sum(axis=2, keepdims=True)
        wide = _copies(ours.offsets[:, :, :1], theirs.offsets[:, :, :1], heads, 0 * heads)
    return [(fills, wide), (~fills, _copies(ours.offsets, theirs.offsets, each, each))]


def _copies(*columns: NDArray[np.int64]) -> _Copies:
    return _Copies(*(column.ravel() for column in columns))


def _locate(
    run: BlockRun, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For each token: (bytes of the run before its block; the block's offset; its slot)."""
    rank = tokens // run.layout.block_size - run.first_block
    block_bytes = run.layout.block_bytes
    return rank * block_bytes, run.block_ids[rank] * block_bytes, tokens % run.layout.block_size


def _coalesce(spans: Spans) -> Spans:
    ends = spans[:-1, :2] + spans[:-1, 2:]
    is_first = np.concatenate([[True], (ends != spans[1:, :2]).any(axis=1)])
    firsts = np.flatnonzero(is_first)
    joined = spans[firsts]
    joined[:, 2] = np.add.reduceat(spans[:, 2], firsts)
    return joined
