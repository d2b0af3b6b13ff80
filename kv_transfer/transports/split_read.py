"""Pure arithmetic: splits a read into parts that can be carried out at the same time."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from kv_transfer.spans.plan import Spans
from kv_transfer.transports.interface import Read
from pdserve.kv import KvLayout


def split_read(read: Read, layout: KvLayout, num_parts: int) -> list[Read]:
    """Split the read at borders of source blocks into at most `num_parts` parts of similar size.

    Each is a read of its own, of a part of the box. `layout` is the source's.
    """
    box, size, count = read.box, layout.block_size, len(read.block_ids)
    parts, position = [], 0
    for first, end in pairwise(count * i // num_parts for i in range(num_parts + 1)):
        if first == end:
            continue
        block = box.begin // size
        part = msgspec.structs.replace(
            box,
            begin=max(box.begin, (block + first) * size),
            end=min(box.end, (block + end) * size),
        )
        num_bytes = part.num_bytes(layout)
        parts.append(
            Read(
                sealed=read.sealed,
                box=part,
                block_ids=read.block_ids[first:end],
                generations=read.generations[first:end],
                spans=_cut(read.spans, position, position + num_bytes),
                num_bytes=num_bytes,
                destination=read.destination,
                sending=read.sending,
            )
        )
        position += num_bytes
    return parts


def _cut(spans: Spans, begin: int, end: int) -> Spans:
    """The spans of stream positions [begin, end), which are not empty."""
    ends = np.cumsum(spans[:, 2])
    first, last = np.searchsorted(ends, [begin, end - 1], side="right")
    cut = spans[first : last + 1].copy()
    cut[-1, 2] -= ends[last] - end
    skipped = begin - (ends[first] - spans[first, 2])
    cut[0] += (skipped, skipped, -skipped)
    return cut
