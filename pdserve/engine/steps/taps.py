"""Has steps copy out what a head goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.engine.request import Request, Scheduled
from pdserve.engine.steps.batch import Batch, Taps, WantedStates
from pdserve.engine.steps.tapped import Tapped


class TapPlan(NamedTuple):
    """Which rows a head wants."""

    head: str  # its name: heads of one name go on from the same rows
    layers: tuple[int, ...]  # before which; (): those behind the last norm


def tap(
    plan: TapPlan, batch: Batch, hidden_size: int, *, is_pinned: bool = False
) -> tuple[Batch, Tensor]:
    """Have a step copy its sampled rows out; return where to: [num_sampled, width].

    Args:
        plan: which rows.
        batch: the step. No states are wanted of it otherwise.
        hidden_size: of the model.
        is_pinned: a GPU writes them.
    """
    num_sampled, num_taps = len(batch.sampled_rows), max(1, len(plan.layers))
    out = torch.empty(num_sampled, num_taps * hidden_size, pin_memory=is_pinned)
    if not plan.layers:
        return replace(batch, states=WantedStates(batch.sampled_rows.clone(), out)), out
    taps = Taps(torch.tensor(plan.layers), out.view(num_sampled, num_taps, hidden_size))
    return replace(batch, taps=taps), out


def each_tapped(
    plan: TapPlan, rows: Sequence[Scheduled], out: Tensor
) -> Iterator[tuple[Request, Tapped]]:
    """Yield what the step has copied out of each request that it sampled."""
    sampled = [row for row in rows if row.samples]
    found = out.numpy()
    counts = [1 + len(row.request.draft) for row in sampled]
    for row, count, end in zip(sampled, counts, accumulate(counts), strict=True):
        first = row.request.num_computed_tokens + row.num_tokens - count
        yield row.request, Tapped(plan.head, first, found[end - count : end])
