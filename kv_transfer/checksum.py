"""Checksums of KV that add up, block by block.

A ticket has one per block, KV head and group of layers, over the bytes that it names, by their
places in the exporter's block (csrc/transfer/block_sum.h). A sum of parts is that of the whole. So
a puller compares what it has read of a block with the sum of the checksums of these heads and
layers, and a copy adds up the bytes that pass through its registers. Blocks of another layout are
laid out as the exporter's for the comparison.

Layers of one group, with the same attention window, are pulled together. Checksums detect wrong
bytes of any origin; generations detect blocks that were reused. Pools on GPUs neither create nor
verify them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.box import BlockRun, KvBox, Rows, whole_box
from kv_transfer.spans.plan import Spans, cut_at_whole_blocks, plan_spans, whole_blocks
from kv_transfer.threads import CancelFlag
from kv_transfer.ticket import Ticket
from pdserve import _native
from pdserve.kv import KvLayout, need
from pdserve.shared.errors import CorruptTransfer, TicketInvalid

Sums = NDArray[np.uint64]

_WORD: Final = 8  # bytes
_MAX_ROWS: Final = 256  # tables that are remembered: every pull asks for the same ones
_SCRATCH_BYTES: Final = 4 << 20


@lru_cache(_MAX_ROWS)
def layer_groups(windows: tuple[int | None, ...], num_layers: int) -> tuple[int, ...]:
    """Return the group of each layer of the model, given their windows in tokens; (): no windows.

    Groups are counted from 0, in the order of their first layers.
    """
    kinds = dict.fromkeys(windows)
    numbers = {window: number for number, window in enumerate(kinds)}
    return tuple(numbers[window] for window in windows) or (0,) * num_layers


def block_sums(
    region: NDArray[np.uint8], run: BlockRun, box: KvBox, groups: tuple[int, ...]
) -> Sums:
    """The checksums of a box in blocks of `region`: [num_blocks, num_heads, num_groups].

    The first and the last block may be only partly in the box.
    """
    run.check_covers(box)
    num_groups = max(groups) + 1
    sums = [
        _native.sum_blocks(
            region,
            _offsets(run, blocks),
            _rows(run.layout, slots, groups),
            box.num_heads * num_groups,
        )
        for blocks, slots in _pieces(box, run.layout.block_size)
    ]
    return np.concatenate(sums).reshape(-1, box.num_heads, num_groups)


class Summing:
    """Adds up what one read brings of each block of the source.

    A transport that copies spans by itself may add them up meanwhile: `spans`, each in one block,
    whose `places` tell (first word, block), into `found`. If it does, it says so by `is_done`.
    """

    __slots__ = ("_box", "_destination", "_source", "found", "is_done", "places", "spans")

    def __init__(self, source: BlockRun, destination: BlockRun, box: KvBox) -> None:
        self._source, self._destination, self._box = source, destination, box
        blocks = need.block_range(box.begin, box.end, source.layout.block_size)
        self.found: Sums = np.zeros(len(blocks), dtype=np.uint64)
        self.is_done = False
        self.spans: Spans | None = None
        self.places = _NO_PLACES
        if self._is_of_one_layout and box.num_heads == len(source.layout.heads):
            self.spans, self.places = _summed_spans(source, destination, box)

    @property
    def _is_of_one_layout(self) -> bool:
        return self._source.layout == self._destination.layout

    def begin(self) -> Sums:
        """Begin, also again, to add up; returns `found`, which is 0."""
        self.is_done = False
        self.found[:] = 0
        return self.found

    def add_up(self, region: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """Add up what is in the destination, unless it was done while it was copied."""
        if self.is_done:
            return
        if self.spans is not None:
            rows = np.concatenate([self.spans[:, 1:], self.places], axis=1)
            self.found = _native.sum_blocks(region, _NOWHERE_ELSE, rows, len(self.found))[0]
            return
        box, layout = self._box, self._source.layout
        step = max(1, _SCRATCH_BYTES // layout.block_bytes) * layout.block_size
        begin = box.begin
        sums = []
        while begin < box.end and not cancel.byte[0]:
            end = min(box.end, begin // layout.block_size * layout.block_size + step)
            part = msgspec.structs.replace(box, begin=begin, end=end)
            run, where = self._destination, region
            if not self._is_of_one_layout:
                run, where = self._laid_out(region, part, cancel)
            sums.append(block_sums(where, run, part, (0,) * layout.total_layers).sum(axis=(1, 2)))
            begin = end
        self.found = np.concatenate(sums)

    def _laid_out(
        self, region: NDArray[np.uint8], box: KvBox, cancel: CancelFlag
    ) -> tuple[BlockRun, NDArray[np.uint8]]:
        """A copy of a box of the destination, in the layout of the source."""
        layout = self._source.layout
        blocks = need.block_range(box.begin, box.end, layout.block_size)
        run = BlockRun(layout, np.arange(len(blocks), dtype=np.int64), blocks.start)
        scratch = np.empty(len(blocks) * layout.block_bytes, dtype=np.uint8)
        spans = plan_spans(self._destination, run, box)
        _native.copy_spans(scratch, region, spans, cancel.byte)
        return run, scratch


def wrong_sum(block_id: int, node_id: str) -> CorruptTransfer:
    """What has arrived of a node's block is not what its ticket says."""
    return CorruptTransfer(
        f"block {block_id} of {node_id!r} arrived with another checksum than the ticket's"
    )


class ArrivedSums:
    """Compares with a ticket what reads of the same tokens, in some layers, have brought."""

    def __init__(
        self, ticket: Ticket, source: KvLayout, groups: tuple[int, ...], boxes: Sequence[KvBox]
    ) -> None:
        """`boxes`: what is read, of the same tokens and heads.

        Raises:
            TicketInvalid: the exporter has divided the layers into other groups.
        """
        num_heads = len(source.heads)
        num_blocks = len(ticket.block_ids) // (1 + source.num_companions)
        self._num_groups = len(ticket.sums) // (8 * num_blocks * num_heads)
        if self._num_groups != max(groups) + 1:
            raise TicketInvalid(
                f"the ticket of {ticket.node_id!r} has checksums of {self._num_groups} groups of "
                f"layers, and the model has {max(groups) + 1}"
            )
        self._ticket, self._source = ticket, source
        self._boxes, self._groups = boxes, groups
        size = source.block_size
        first, self._first = boxes[0], boxes[0].begin // size
        blocks = need.block_range(first.begin, first.end, size)
        self._found: Sums = np.zeros(len(blocks), dtype=np.uint64)

    def add(self, summing: Summing, box: KvBox) -> None:
        """Add what a read has brought of the source's blocks."""
        first = box.begin // self._source.block_size - self._first
        self._found[first : first + len(summing.found)] += summing.found

    def check(self) -> None:
        """Compare. Source blocks, or groups of layers, that were read in part only are skipped.

        Raises:
            CorruptTransfer: names the block.
        """
        ticket, size = self._ticket, self._source.block_size
        begin, end = _comparable(ticket, self._boxes[0], size)
        chosen = self._chosen_groups()
        if begin >= end or chosen is None:
            return
        blocks, origin = need.block_range(begin, end, size), ticket.first_block(size)
        expected, per_block = self._expected(blocks.start - origin, blocks.stop - origin, chosen)
        found = self._found[blocks.start - self._first : blocks.stop - self._first]
        wrong = _native.find_wrong(found, expected, per_block)
        if wrong >= 0:
            raise wrong_sum(ticket.block_ids[blocks.start - origin + wrong], ticket.node_id)

    def _expected(self, first: int, end: int, chosen: Sequence[int]) -> tuple[Sums, int]:
        """The ticket's checksums of these of its blocks, for what is read: (flat, per block)."""
        box, heads = self._boxes[0], self._source.heads
        per_block = len(heads) * self._num_groups
        table: Sums = np.frombuffer(
            self._ticket.sums, "<u8", (end - first) * per_block, 8 * first * per_block
        )
        if (box.num_heads, len(chosen)) == (len(heads), self._num_groups):
            return table, per_block
        own = slice(box.first_head - heads.start, box.end_head - heads.start)
        wanted = table.reshape(-1, len(heads), self._num_groups)[:, own, list(chosen)]
        return np.ascontiguousarray(wanted).reshape(-1), box.num_heads * len(chosen)

    def _chosen_groups(self) -> Sequence[int] | None:
        """The groups that were read; None: of one of them not all that is in the ticket."""
        if len(self._boxes) == 1 and self._has_all_layers(self._boxes[0]):
            return range(self._num_groups)  # those without a layer in the ticket have sums of 0
        ticketed = range(self._ticket.first_layer, self._ticket.end_layer)
        read = {layer for box in self._boxes for layer in range(box.first_layer, box.end_layer)}
        chosen = {self._groups[layer] for layer in read}
        if any(self._groups[layer] in chosen and layer not in read for layer in ticketed):
            return None
        return sorted(chosen)

    def _has_all_layers(self, box: KvBox) -> bool:
        ticket = self._ticket
        return (box.first_layer, box.end_layer) == (ticket.first_layer, ticket.end_layer)


def _comparable(ticket: Ticket, box: KvBox, size: int) -> tuple[int, int]:
    """The tokens of a box in blocks of which all is read that the ticket names."""
    whole = need.full_range(box.begin, box.end, size)
    begin = box.begin if box.begin == ticket.first_token else whole.start * size
    end = box.end if box.end == ticket.end_token else whole.stop * size
    return begin, end


def _pieces(box: KvBox, size: int) -> list[tuple[range, KvBox]]:
    """(Blocks, box of slots in each): its whole blocks, and the blocks that it has a part of."""
    return [
        (
            need.block_range(part.begin, part.end, size),
            msgspec.structs.replace(part, begin=part.begin % size, end=part.end % size or size),
        )
        for part in cut_at_whole_blocks(size, box)
    ]


def _offsets(run: BlockRun, blocks: range) -> NDArray[np.int64]:
    ids = run.block_ids[blocks.start - run.first_block : blocks.stop - run.first_block]
    offsets: NDArray[np.int64] = ids * run.layout.block_bytes
    return offsets


@lru_cache(_MAX_ROWS)
def _rows(layout: KvLayout, slots: KvBox, groups: tuple[int, ...]) -> NDArray[np.int64]:
    """[rows, 4]: (offset in a block, bytes, first word, its sum among [heads, groups])."""
    box, rows = slots, Rows.of(layout, slots)
    own_groups = np.array(groups[box.first_layer : box.end_layer], dtype=np.int64)
    heads = np.arange(box.num_heads, dtype=np.int64)
    num_groups = max(groups) + 1
    table = np.empty((*rows.offsets.shape, 4), dtype=np.int64)
    table[..., 0] = rows.offsets + box.begin * rows.slot_bytes
    table[..., 1] = (box.end - box.begin) * rows.slot_bytes
    table[..., 2] = _first_words(layout, box)
    table[..., 3] = heads * num_groups + own_groups[:, None, None]
    return table.reshape(-1, 4)


def _first_words(layout: KvLayout, box: KvBox) -> NDArray[np.int64]:
    """The place of the first word of each row of a block: [num_layers, num_planes, num_heads].

    A row begins with a word of its own, wherever the box begins in it.
    """
    offsets = Rows.of(layout, box).offsets
    if has_whole_words(layout):
        return offsets // _WORD
    # Each row may begin a word later than the one before.
    begins = np.sort(Rows.of(layout, whole_box(layout, 0, 1)).offsets.ravel())
    found: NDArray[np.int64] = offsets // _WORD + np.searchsorted(begins, offsets)
    return found


@lru_cache(_MAX_ROWS)
def has_whole_words(layout: KvLayout) -> bool:
    """Whether each row of a block consists of whole words, so that a block does, too."""
    return all(plane.row_bytes * layout.block_size % _WORD == 0 for plane in layout.planes)


_NOWHERE_ELSE: Final = np.zeros(1, dtype=np.int64)  # offset of rows that have their own
_NO_PLACES: Final = np.empty((0, 2), dtype=np.int64)


def _summed_spans(
    source: BlockRun, destination: BlockRun, box: KvBox
) -> tuple[Spans, NDArray[np.int64]]:
    """The spans of a box, each within a block, and the places of what they bring in sums."""
    source.check_covers(box)
    destination.check_covers(box)
    layout, size = source.layout, source.layout.block_size
    first = box.begin // size
    if box.begin % size == box.end % size == 0 and has_whole_words(layout):
        spans = whole_blocks(source, destination, box, joins=False)
        return spans, _whole_places(layout, len(spans), box.first_layer)
    pieces, places = [], []
    for blocks, slots in _pieces(box, layout.block_size):
        from_offsets, to_offsets = _offsets(source, blocks), _offsets(destination, blocks)
        rows = copied_rows(layout, slots)
        part = np.empty((len(blocks), len(rows), 3), dtype=np.int64)
        part[..., 0] = from_offsets[:, None] + rows[:, 0]
        part[..., 1] = to_offsets[:, None] + rows[:, 0]
        part[..., 2] = rows[:, 1]
        where = np.empty((len(blocks), len(rows), 2), dtype=np.int64)
        where[..., 0] = rows[:, 2]
        where[..., 1] = np.arange(blocks.start - first, blocks.stop - first)[:, None]
        pieces.append(part.reshape(-1, 3))
        places.append(where.reshape(-1, 2))
    return np.concatenate(pieces), np.concatenate(places)


@lru_cache(_MAX_ROWS)
def _whole_places(layout: KvLayout, num_blocks: int, first_layer: int) -> NDArray[np.int64]:
    places = np.empty((num_blocks, 2), dtype=np.int64)
    places[:, 0] = (first_layer - layout.layers.start) * layout.layer_bytes // _WORD
    places[:, 1] = np.arange(num_blocks)
    return places


@lru_cache(_MAX_ROWS)
def copied_rows(layout: KvLayout, slots: KvBox) -> NDArray[np.int64]:
    """As `_rows`, of all heads, but a whole block is one row."""
    rows = _rows(layout, slots, (0,) * layout.total_layers)
    is_whole = (slots.begin, slots.end) == (0, layout.block_size)
    if is_whole and has_whole_words(layout):
        return np.array([[rows[0, 0], rows[:, 1].sum(), rows[0, 2], 0]], dtype=np.int64)
    return rows
