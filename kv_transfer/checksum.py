"""Checksums of KV that do not depend on the layout of either side.

There is one per source block and KV head, over the block's part of the ticket: layer by layer, K
then V, token by token. So a puller can verify them in its own pool even if its blocks have another
size, and a tensor-parallel rank can verify those of its own heads. Checksums detect wrong bytes of
any origin; generations detect blocks that were reused. They are off by default, since each side
reads all bytes once more with its CPU. Pools on GPUs neither create nor verify them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.box import BlockRun, KvBox
from kv_transfer.spans.plan import token_runs
from kv_transfer.ticket import Ticket
from pdserve import _native
from pdserve.errors import CorruptTransfer
from pdserve.kv_layout import KvLayout


def checksums(
    region: NDArray[np.uint8], run: BlockRun, box: KvBox, source_block_size: int
) -> NDArray[np.uint64]:
    """Checksums of the box's KV in `run`'s blocks of `region`: [num_source_blocks, num_heads].

    A source block is `source_block_size` tokens of the request, independent of the size of `run`'s
    blocks. The first and the last one may be only partly in the box.
    """
    run.check_covers(box)
    layout = run.layout
    row_bytes = layout.head_dim * layout.dtype.itemsize
    starts, lengths = token_runs(box.begin, box.end, layout.block_size, source_block_size)
    block = run.block_ids[starts // layout.block_size - run.first_block] * layout.block_bytes
    slot = starts % layout.block_size * row_bytes
    layers = np.array([box.first_layer, box.end_layer]) - layout.first_layer
    halves = np.arange(*(2 * layers), dtype=np.int64)
    heads = np.arange(box.num_heads, dtype=np.int64) + box.first_head - layout.first_kv_head
    # [num_heads, num_halves], the rows of a block
    rows = (halves * layout.num_kv_heads + heads[:, None]) * layout.head_bytes
    sums = []
    owner = starts // source_block_size
    for source_block in range(box.begin // source_block_size, -(-box.end // source_block_size)):
        runs = owner == source_block
        # [num_heads, num_halves, num_runs]
        offsets = rows[:, :, None] + (block + slot)[runs]
        nbytes = np.broadcast_to(lengths[runs] * row_bytes, offsets.shape)
        ranges = np.stack([offsets.ravel(), nbytes.ravel()], axis=1)
        sums.append(_native.checksum_ranges(region, ranges, row_bytes, box.num_heads))
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
    begin = box.begin if box.begin == ticket.first_token else -(-box.begin // size) * size
    end = box.end if box.end == ticket.end_token else box.end // size * size
    whole_layers = (box.first_layer, box.end_layer) == (ticket.first_layer, ticket.end_layer)
    if not ticket.checksums or begin >= end or not whole_layers:
        return
    part = KvBox(begin, end, box.first_layer, box.end_layer, box.first_head, box.end_head)
    found = checksums(region, run, part, size)
    first = begin // size - ticket.first_block(size)
    heads = slice(box.first_head - source.first_kv_head, box.end_head - source.first_kv_head)
    table = np.array(ticket.checksums, dtype=np.uint64).reshape(-1, source.num_kv_heads)
    wrong = np.argwhere(found != table[first : first + len(found), heads])
    if len(wrong):
        index, head = wrong[0].tolist()
        raise CorruptTransfer(
            f"KV head {box.first_head + head} of block {ticket.block_ids[first + index]} of "
            f"{ticket.node_id!r} arrived with another checksum than the ticket's "
            f"({len(wrong)} of {found.size} differ)"
        )
