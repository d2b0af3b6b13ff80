"""Validation of generations: the reader's half of the seqlock (the owner's half is KvPool.bump)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.errors import StaleTicket


def check_generations(
    generations: NDArray[np.uint64], block_ids: NDArray[np.int64], expected: NDArray[np.uint64]
) -> None:
    """Check that what was read from these blocks before this call is what the ticket names.

    Raises:
        StaleTicket: a block was reused; with its id and both generations.
        ValueError: an id is out of range.
    """
    index = _native.find_stale(generations, block_ids, expected)
    if index >= 0:
        block_id = int(block_ids[index])
        raise _stale(block_id, int(generations[block_id]), int(expected[index]))


def check_read_generations(
    found: NDArray[np.uint64], block_ids: NDArray[np.int64], expected: NDArray[np.uint64]
) -> None:
    """As check_generations, given the generations `found[i]` that were read for `block_ids[i]`.

    Raises:
        StaleTicket: as check_generations.
    """
    differ = np.flatnonzero(found != expected)
    if len(differ):
        first = differ[0]
        raise _stale(int(block_ids[first]), int(found[first]), int(expected[first]))


def _stale(block_id: int, found: int, expected: int) -> StaleTicket:
    return StaleTicket(f"block {block_id} has generation {found}, the ticket is for {expected}")
