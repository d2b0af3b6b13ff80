"""Pools the final states of a prompt's tokens into embeddings, while the prompt is computed.

Final states are the hidden states after the last norm. The last token's state is always computed,
so prompts with last-token pooling reuse cached KV like any other. Mean pooling needs the states of
all tokens, and states are not cached with the KV: such a prompt can only skip tokens whose states
are already in its sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.engine.request import Scheduled
from pdserve.engine.sampling.limits import unusable
from pdserve.engine.steps.batch import Batch, WantedStates


def wanted_states(rows: Sequence[Scheduled], batch: Batch, hidden_size: int) -> WantedStates | None:
    """Return the states that the step's requests pool, or None if there are none.

    Args:
        rows: the step's plan.
        batch: the plan as tensors, on the host.
        hidden_size: of the model.
    """
    starts: list[int] = batch.attention.query_start.tolist()
    wanted = [
        start + position - row.request.num_computed_tokens
        for start, row in zip(starts, rows, strict=False)
        for position in _pooled_positions(row)
    ]
    if not wanted:
        return None
    return WantedStates(torch.tensor(wanted), torch.empty(len(wanted), hidden_size))


def pool(rows: Sequence[Scheduled], states: WantedStates) -> None:
    """Add the states to the sums in their requests.

    Raises:
        UnusableLogits: the states of a request are not finite.
    """
    found = states.out.numpy()  # [num_states, hidden_size]
    damaged = []
    begin = 0
    for row in rows:
        num_states = len(_pooled_positions(row))
        if num_states == 0:
            continue
        # In float64, so that the rounded result does not depend on how the prompt is chunked.
        total = found[begin : begin + num_states].sum(axis=0, dtype=np.float64)
        begin += num_states
        work = row.request.prompt_work
        assert work is not None, "it has positions to pool"
        if np.isfinite(total).all():
            work.add_states(total, num_states)
        else:
            damaged.append(row.request)
    if damaged:
        raise unusable(damaged)


def _pooled_positions(row: Scheduled) -> range:
    """Positions in the chunk whose final states are the next ones to pool for the embedding."""
    work, begin = row.request.prompt_work, row.request.num_computed_tokens
    return range(0) if work is None else work.pooled_positions(begin, begin + row.num_tokens)
