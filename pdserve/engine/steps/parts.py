"""A step in parts, each a step of its own: pipeline stages compute different ones at a time.

A part has some of the step's rows, in their order, so what they attend to is in the pool by then: a
request that has rows before and after them has only those before in its context.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.steps.batch import Batch


def in_parts(batch: Batch, count: int) -> list[Batch]:
    """Return the parts of a step that is on the host, whose rows differ by at most one.

    What else goes to the device does so with the last one.
    """
    if count == 1:
        return [batch]
    total = len(batch.token_ids)
    edges = [number * total // count for number in range(count + 1)]
    parts = [rows_within(batch, first, end) for first, end in pairwise(edges)]
    return [*(replace(part, cargo=None) for part in parts[:-1]), parts[-1]]


def rows_within(batch: Batch, first: int, end: int) -> Batch:
    """Return the rows [first, end) of a batch on the host, of which there is at least one."""
    whole = batch.attention
    starts = whole.query_start.numpy()
    begin, stop = np.searchsorted(starts, first, "right") - 1, np.searchsorted(starts, end)
    ends = np.minimum(starts[begin + 1 : stop + 1], end)
    later = starts[begin + 1 : stop + 1] - ends  # rows of each request that are behind the part
    before = np.maximum(0, first - starts[begin:stop])  # rows in front of it, likewise
    tables = batch.state_tables
    if tables is not None:
        tables = tables.within(slice(begin, stop), before, ends - starts[begin:stop] - before)
    sampled = slice(*np.searchsorted(batch.sampled_rows.numpy(), [first, end]))
    attention = AttentionBatch(
        query_start=torch.from_numpy(np.concatenate([starts.dtype.type([0]), ends - first])),
        context_lens=torch.from_numpy(whole.context_lens.numpy()[begin:stop] - later),
        block_tables=whole.block_tables[begin:stop],
        slot_mapping=whole.slot_mapping[first:end],
    )
    return replace(
        batch,
        token_ids=batch.token_ids[first:end],
        positions=batch.positions[first:end],
        attention=attention,
        sampled_rows=batch.sampled_rows[sampled] - first,
        sampled_requests=batch.sampled_requests[sampled],
        adapters=batch.adapters[begin:stop],
        adapted_from=batch.adapted_from[begin:stop],
        state_tables=tables,
        states=None if batch.states is None else batch.states.within(first, end),
        taps=None if batch.taps is None else replace(batch.taps, out=batch.taps.out[sampled]),
    )
