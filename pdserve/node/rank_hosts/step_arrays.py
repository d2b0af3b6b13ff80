"""What the hosts of a node need of a step, as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.node.rank_hosts.lacking import Ids, slots_of_step


@dataclass(frozen=True, slots=True)
class HostStepArrays:
    """The step that is running."""

    tables: NDArray[np.int32]  # [num_requests, max_blocks]
    first: Ids  # [num_requests], the first token that it computes
    end: Ids  # [num_requests], one past the last one
    slots: tuple[Ids, Ids]  # (blocks, places in them) of each row
    results: list[NDArray[Any]]  # in memory that all ranks share: logits, then states
    taps: NDArray[np.float32]  # likewise: [num_sampled, num_taps, hidden_size]
    later: Ids  # those taps that the later host has

    @classmethod
    def of(
        cls,
        steps: StepMemory,
        sizes: tuple[int, int],
        block_size: int,
        first_layer: int,
    ) -> HostStepArrays:
        """Read them from the memory of the step.

        Args:
            steps: the memory.
            sizes: hidden_size and vocab_size.
            block_size: of the pool.
            first_layer: of the model, that the later host has.
        """
        hidden_size, vocab_size = sizes
        batch = steps.read(hidden_size, vocab_size)
        query_start = batch.attention.query_start.numpy().astype(np.int64)
        end = batch.attention.context_lens.numpy().astype(np.int64)
        tables = batch.attention.block_tables.numpy()
        states, taps = steps.states(*sizes), steps.taps(*sizes)
        layers = np.empty(0) if batch.taps is None else batch.taps.layers.numpy()
        return cls(
            tables=tables,
            first=end - np.diff(query_start),
            end=end,
            slots=slots_of_step(tables, query_start, end, block_size),
            results=[steps.logits(len(batch.sampled_rows), vocab_size).numpy(), states.numpy()],
            taps=taps.numpy(),
            later=np.flatnonzero(layers >= first_layer),
        )

    def tapped(self) -> NDArray[np.float32]:
        """A copy of the later host's taps: [num_sampled, len(later), hidden_size]."""
        return np.ascontiguousarray(self.taps[:, self.later])

    def set_tapped(self, rows: NDArray[np.float32]) -> None:
        """Write what `tapped` has returned there."""
        self.taps[:, self.later] = rows

    def parts(self, hidden_size: int) -> Iterator[NDArray[np.float32]]:
        """Memory for the residual stream of each part of the step: [num_rows, hidden_size]."""
        most, num_tokens = _native.RankGroup.rows_of_part(hidden_size), len(self.slots[0])
        rows = np.empty((min(most, num_tokens), hidden_size), np.float32)
        for first in range(0, num_tokens, most):
            yield rows[: min(most, num_tokens - first)]
