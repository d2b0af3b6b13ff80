"""The reader's half of the seqlock (the owner's half is ExportedPool.bump)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.errors import StaleTicket


def check_generations(
    generations: NDArray[np.uint64], block_ids: NDArray[np.int64], expected: NDArray[np.uint64]
) -> None:
    """That whatever was read from these blocks before this call is what the ticket meant.

    Raises:
        StaleTicket: a block changed hands; with its id and both generations.
        ValueError: an id is out of range.
    """
    index = _native.find_stale(generations, block_ids, expected)
    if index >= 0:
        block_id = int(block_ids[index])
        raise StaleTicket(
            f"block {block_id} has generation {int(generations[block_id])}, "
            f"the ticket is for {int(expected[index])}"
        )
