"""Checksums of KV that do not depend on the layout of either side.

There is one per source block and KV head, over the block's part of the ticket: layer by layer,
plane by plane, token by token. So a puller can verify them in its own pool even if its blocks have
another size, and a tensor-parallel rank can verify those of its own heads. Checksums detect wrong
bytes of any origin; generations detect blocks that were reused. They are off by default, since each
side reads all bytes once more with its CPU. Pools on GPUs neither create nor verify them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.box import BlockRun, KvBox, Rows
from kv_transfer.spans.plan import token_runs
from kv_transfer.ticket import Ticket
from pdserve import _native
from pdserve.kv import KvLayout, need
from pdserve.shared.errors import CorruptTransfer


def checksums(
    region: NDArray[np.uint8], run: BlockRun, box: KvBox, source_block_size: int
) -> NDArray[np.uint64]:
    """Checksums of the box's KV in `run`'s blocks of `region`: [num_source_blocks, num_heads].

    A source block is `source_block_size` tokens of the request, independent of the size of `run`'s
    blocks. The first and the last one may be only partly in the box.
    """
    run.check_covers(box)
    layout = run.layout
    rows = Rows.of(layout, box)
    starts, lengths = token_runs(box.begin, box.end, layout.block_size, source_block_size)
    block = run.block_ids[starts // layout.block_size - run.first_block] * layout.block_bytes
    # [num_layers, num_planes, num_heads, num_runs]
    places = (
        rows.offsets[..., None] + block + starts % layout.block_size * rows.slot_bytes[..., None]
    )
    widths = np.broadcast_to(lengths * rows.slot_bytes[..., None], places.shape)
    # [num_heads, num_layers, num_planes, num_runs, 2]
    ranges = np.moveaxis(np.stack([places, widths], axis=-1), 2, 0)
    unit_bytes = math.gcd(*(plane.row_bytes for plane in layout.planes))
    sums = []
    owner = starts // source_block_size
    for source_block in need.block_range(box.begin, box.end, source_block_size):
        own = np.ascontiguousarray(ranges[:, :, :, owner == source_block]).reshape(-1, 2)
        sums.append(_native.checksum_ranges(region, own, unit_bytes, box.num_heads))
    return np.stack(sums)


def check_arrived(
    ticket: Ticket, source: KvLayout, region: NDArray[np.uint8], run: BlockRun, box: KvBox
) -> None:
    """Verify the ticket's checksums for a box that was pulled.

    Source blocks that were pulled only in part cannot be verified, and are skipped.

    Raises:
        CorruptTransfer: names the block and the KV head.
    """
    size = source.block_size
    whole = need.full_range(box.begin, box.end, size)
    begin = box.begin if box.begin == ticket.first_token else whole.start * size
    end = box.end if box.end == ticket.end_token else whole.stop * size
    whole_layers = (box.first_layer, box.end_layer) == (ticket.first_layer, ticket.end_layer)
    if not ticket.checksums or begin >= end or not whole_layers:
        return
    part = KvBox(begin, end, box.first_layer, box.end_layer, box.first_head, box.end_head)
    found = checksums(region, run, part, size)
    first = need.full_blocks(begin, size) - ticket.first_block(size)
    heads = slice(box.first_head - source.heads.start, box.end_head - source.heads.start)
    table = np.array(ticket.checksums, dtype=np.uint64).reshape(-1, len(source.heads))
    wrong = np.argwhere(found != table[first : first + len(found), heads])
    if len(wrong):
        index, head = wrong[0].tolist()
        raise CorruptTransfer(
            f"KV head {box.first_head + head} of block {ticket.block_ids[first + index]} of "
            f"{ticket.node_id!r} arrived with another checksum than the ticket's "
            f"({len(wrong)} of {found.size} differ)"
        )
