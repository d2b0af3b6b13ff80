"""What embeddings are made of: final states of a prompt's tokens, found while it is computed.

They are the hidden states behind the last norm. The last token's is computed whatever is cached,
so such an embedding reuses cached KV like any other prompt. The mean is of every token's, and
states are not kept where KV is: these prompts are computed from where their states are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.engine.batch import Batch, WantedStates
from pdserve.engine.request import Scheduled
from pdserve.engine.sampling.limits import unusable


def wanted_states(rows: Sequence[Scheduled], batch: Batch, hidden_size: int) -> WantedStates | None:
    """Those that a step's requests pool; None: there are none.

    Args:
        rows: the step's plan.
        batch: the same as tensors, on the host.
        hidden_size: of the model.
    """
    starts: list[int] = batch.attention.query_start.tolist()
    wanted = [
        start + position - row.request.num_computed_tokens
        for start, row in zip(starts, rows, strict=False)
        for position in row.pooled_positions
    ]
    if not wanted:
        return None
    return WantedStates(torch.tensor(wanted), torch.empty(len(wanted), hidden_size))


def pool(rows: Sequence[Scheduled], states: WantedStates) -> None:
    """Add them up in their requests.

    Raises:
        UnusableLogits: those of a request are not finite.
    """
    found = states.out.numpy()  # [num_states, hidden_size]
    damaged = []
    begin = 0
    for row in rows:
        num_states = len(row.pooled_positions)
        if num_states == 0:
            continue
        # In float64, so that chunks make no difference once it is rounded.
        total = found[begin : begin + num_states].sum(axis=0, dtype=np.float64)
        begin += num_states
        if np.isfinite(total).all():
            row.request.add_states(total, num_states)
        else:
            damaged.append(row.request)
    if damaged:
        raise unusable(damaged)
