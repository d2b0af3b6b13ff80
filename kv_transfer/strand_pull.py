"""What a pull reads over one strand, compared with the checksums of its ticket."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kv_transfer.checksum import ArrivedSums, Summing, wrong_sum
from kv_transfer.links.link import Link
from kv_transfer.links.sharded_link import Strand
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.spans.box import BlockRun, KvBox
from kv_transfer.spans.layer_pieces import part_of, pieces
from kv_transfer.spans.plan import Spans, is_quick, plan_spans, split_box
from kv_transfer.statistics import PullerStatistics
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.ticket import Ticket
from kv_transfer.transports.block_read import BlockRead
from kv_transfer.transports.interface import Read
from pdserve.kv.companions import Companions
from pdserve.shared.errors import CorruptTransfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """What strands of a pull have moved."""

    num_bytes: int
    read_s: float  # in the transport


@dataclass(frozen=True, slots=True)
class PullTools:
    """What all pulls of a puller use."""

    groups: tuple[int, ...]  # of the model's layers: see checksum.py
    threads: CopyThreads
    statistics: PullerStatistics


async def twice(read: Callable[[], Awaitable[Moved]], statistics: PullerStatistics) -> Moved:
    """Read, and once more if the checksums are wrong.

    Raises:
        CorruptTransfer: they were wrong again.
    """
    try:
        return await read()
    except CorruptTransfer as error:
        log.warning("%s", error)
        statistics.corrupt += 1
        statistics.retried += 1
        return await read()


async def pull_blocks(link: Link, read: BlockRead) -> Moved:
    """Read few blocks, and compare them with their checksums.

    Raises:
        CorruptTransfer: names the block.
    """
    started_s = time.perf_counter()
    read.wrong = None
    await link.read_blocks(read)
    moved = Moved(read.num_bytes, time.perf_counter() - started_s)
    if (wrong := read.find_wrong()) >= 0:
        raise wrong_sum(read.source_ids[wrong], link.welcome.node_id)
    return moved


class StrandPull:
    """Reads boxes of one ticket over one strand, into the blocks of one part of the pool."""

    __slots__ = ("_companions", "_destination", "_pool", "_sealed", "_strand", "_ticket", "_tools")

    def __init__(
        self,
        tools: PullTools,
        strand: Strand,
        sealed: bytes,
        ticket: Ticket,
        destination: BlockRun,
        pool: KvPool,
        companions: Companions | None = None,
    ) -> None:
        """`companions`: of the destination's blocks."""
        self._tools = tools
        self._strand = strand
        self._sealed, self._ticket = sealed, ticket
        self._destination, self._pool = destination, pool
        self._companions = companions

    async def read(self, boxes: Sequence[KvBox]) -> Moved:
        """Read boxes of the same tokens. If their checksums are wrong, read them once more.

        Raises:
            CorruptTransfer: they were wrong again.
        """
        return await twice(partial(self._read, boxes), self._tools.statistics)

    async def _read(self, boxes: Sequence[KvBox]) -> Moved:
        """Read the boxes, one read per plan."""
        theirs, ticket, pool = self._strand.link.welcome.layout, self._ticket, self._pool
        arrived = None
        if ticket.sums and isinstance(pool, ExportedPool):
            arrived = ArrivedSums(ticket, theirs, self._tools.groups, boxes)
        num_bytes, read_s = 0, 0.0
        for part in self._parts(boxes):
            layout, which = part_of(theirs, part) if theirs.windows else (theirs, 0)
            block_ids, generations = ticket.blocks_between(
                part.begin, part.end, layout.block_size, which
            )
            source = BlockRun(layout, block_ids, layout.full_blocks(part.begin))
            target = self._destination
            if target.layout.windows:
                target = self._blocks_for(part)
            summing = Summing(source, target, part) if arrived is not None else None
            spans = summing.spans if summing is not None else None
            if spans is None:
                spans = await self._plan(source, target, part)
            size = part.num_bytes(layout)
            read = Read(self._sealed, part, block_ids, generations, spans, size, pool, summing)
            started_s = time.perf_counter()
            await self._strand.link.read(read)
            read_s += time.perf_counter() - started_s
            num_bytes += size
            if arrived is not None and summing is not None:
                await self._add_up(summing, size)
                arrived.add(summing, part)
        if arrived is not None:
            arrived.check()
        return Moved(num_bytes, read_s)

    def _parts(self, boxes: Sequence[KvBox]) -> Sequence[KvBox]:
        layout, ours = self._strand.link.welcome.layout, self._destination.layout
        if layout.windows or ours.windows:
            boxes = [piece for box in boxes for piece in pieces(box, layout, ours)]
        if len(boxes) == 1:
            return split_box(layout, ours, boxes[0])
        return [part for box in boxes for part in split_box(layout, ours, box)]

    def _blocks_for(self, piece: KvBox) -> BlockRun:
        """The blocks of ours that a piece goes to: the first ones, or companions."""
        first = self._destination
        layout, which = part_of(first.layout, piece)
        if which == 0 or self._companions is None:
            return BlockRun(layout, first.block_ids)
        block_ids = self._companions[first.block_ids, which - 1].astype(np.int64)
        needed = block_ids[layout.full_blocks(piece.begin) : layout.blocks_for(piece.end)]
        assert needed.min(initial=0) >= 0, "what windows have passed is not pulled"
        return BlockRun(layout, block_ids)

    async def _plan(self, source: BlockRun, destination: BlockRun, box: KvBox) -> Spans:
        plan = partial(plan_spans, source, destination, box)
        if is_quick(source.layout, destination.layout, box):
            return plan()
        return await self._tools.threads.run(plan, CancelFlag())

    async def _add_up(self, summing: Summing, num_bytes: int) -> None:
        """Add up what has arrived, unless the transport did so as it copied."""
        if not summing.is_done and isinstance(self._pool, ExportedPool):
            cancel = CancelFlag()
            add_up = partial(summing.add_up, self._pool.flat, cancel)
            await self._tools.threads.move(add_up, cancel, num_bytes)
