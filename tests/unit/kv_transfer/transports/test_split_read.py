"""Parts of a read: together they are the read, and each is one that an exporter would serve."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.memory import ExportedPool
from kv_transfer.spans.plan import plan_spans, source_ranges
from kv_transfer.transports.interface import Read
from kv_transfer.transports.split_read import split_read
from tests.unit.kv_transfer.random_plans import Plan, plans


def bytes_of(spans: np.ndarray) -> list[tuple[int, int]]:
    """(source, destination) of every single byte, in order."""
    return [
        (source + i, destination + i)
        for source, destination, nbytes in spans.tolist()
        for i in range(nbytes)
    ]


@given(plans(), st.integers(1, 5))
def test_the_parts_are_the_whole(plan: Plan, num_parts: int) -> None:
    source, destination, box = plan
    size = source.layout.block_size
    first = box.begin // size
    ids = source.block_ids[first - source.first_block :][: -(-box.end // size) - first]
    spans = plan_spans(source, destination, box)
    pool = ExportedPool(1, 8)
    read = Read(b"", box, ids, ids.astype(np.uint64), spans, box.num_bytes(source.layout), pool)
    parts = split_read(read, source.layout, num_parts)
    pool.close()
    assert len(parts) == min(num_parts, len(ids))
    assert [byte for part in parts for byte in bytes_of(part.spans)] == bytes_of(spans)
    assert np.concatenate([part.block_ids for part in parts]).tolist() == ids.tolist()
    assert [part.box.begin for part in parts[1:]] == [part.box.end for part in parts[:-1]]
    for part in parts:
        assert part.num_bytes == part.spans[:, 2].sum() > 0
        served = source_ranges(source, part.box)
        assert [a for a, _ in bytes_of(np.insert(served, 1, 0, axis=1))] == [
            a for a, _ in bytes_of(part.spans)
        ]
