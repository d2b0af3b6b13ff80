"""Which KV blocks a later host lacks: all that it has neither computed nor been sent.

Blocks are written by steps, which all hosts compute, and by others: pulls, the host tier, copies.
Those are not followed. A block's generation says whether it is still the one that the host knows,
and within a generation tokens are only added.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class KnownBlocks:
    """What the later host has, by block."""

    def __init__(self, generations: NDArray[np.uint64], block_size: int) -> None:
        """`generations`: uint64[num_blocks], of the pool, as they are at any time."""
        self._generations = generations
        self._block_size = block_size
        self._known = np.zeros_like(generations)
        self._num_tokens = np.zeros(len(generations), np.int64)

    def take_lacking(
        self, tables: NDArray[np.int32], first: NDArray[np.int64], end: NDArray[np.int64]
    ) -> Ids:
        """Return the blocks that must be sent for a step, which are known from then on.

        Args:
            tables: [num_requests, max_blocks], of each request.
            first: [num_requests], its first token that the step computes.
            end: [num_requests], one past the last one.
        """
        starts = np.arange(tables.shape[1]) * self._block_size
        needed = np.clip(first[:, None] - starts, 0, self._block_size)
        is_needed = needed > 0
        ids, counts = tables[is_needed].astype(np.int64), needed[is_needed]
        is_other = self._known[ids] != self._generations[ids]
        lacking = np.unique(ids[is_other | (self._num_tokens[ids] < counts)])
        self._know(ids, counts)
        after = np.clip(end[:, None] - starts, 0, self._block_size)
        is_written = after > needed
        self._know(tables[is_written].astype(np.int64), after[is_written])
        return lacking

    def _know(self, ids: Ids, counts: NDArray[np.int64]) -> None:
        is_new = self._known[ids] != self._generations[ids]
        self._num_tokens[ids[is_new]] = 0
        self._known[ids] = self._generations[ids]
        np.maximum.at(self._num_tokens, ids, counts)


def slots_of_step(
    tables: NDArray[np.int32],
    query_start: NDArray[np.int64],
    end: NDArray[np.int64],
    block_size: int,
) -> tuple[Ids, Ids]:
    """Return where the KV of each row of a step is: (blocks, places in them), [num_tokens] each.

    Args:
        tables: [num_requests, max_blocks].
        query_start: [num_requests + 1], rows of each request, which are its newest tokens.
        end: [num_requests], tokens of each, those rows included.
    """
    counts = np.diff(query_start)
    requests = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(query_start[-1]) - query_start[1:][requests] + end[requests]
    return tables[requests, positions // block_size].astype(np.int64), positions % block_size
