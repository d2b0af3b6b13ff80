"""A rank other than 0: `python -m pdserve.engine.ranks.process ORDER`, a RankOrder as JSON.

It loads its share of the weights, and computes the steps that rank 0 writes, until it is killed: it
ends with rank 0, and has nothing to put in order.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.ranks.order import RankOrder
from pdserve.engine.ranks.sizes import memory_bytes
from pdserve.shared.errors import PdserveError
from pdserve.shared.process.limited_child import die_with_parent

MAPPED = b"m"  # written to the standard output once it has mapped the memory


def run_rank(order: RankOrder, mapped_fd: int) -> None:
    """Be a rank, until rank 0 has ended, or gives up.

    The pool must be mapped before rank 0 seals it, so that comes first.

    Raises:
        PdserveError: the weights cannot be used.
        RanksLost: another rank has ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal tells all; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    memory = _mapped(order.memory_fd, memory_bytes(order.stages))
    pool = _mapped(order.pool_fd, order.num_blocks * order.layout.block_bytes)
    os.write(mapped_fd, MAPPED)
    os.close(mapped_fd)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    from pdserve.engine.ranks.steps import compute_steps  # imports torch

    compute_steps(order, memory, pool)


def _mapped(fd: int, size: int) -> NDArray[np.uint8]:
    mapping = _native.map_shared(fd, size, writable=True)
    os.close(fd)
    return mapping


def be_rank(run: Callable[[int], None], parent: int, who: str) -> None:
    """Do what a rank's process does; `run` is given the descriptor to write MAPPED to."""
    die_with_parent(parent)
    try:
        run(sys.stdout.fileno())
    except _native.RanksLost:
        sys.exit(1)  # whoever was first has said why
    except PdserveError as error:
        sys.stderr.write(f"pdserve {who}: error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    _order = msgspec.json.decode(sys.argv[1], type=RankOrder)
    be_rank(partial(run_rank, _order), _order.parent, f"rank {_order.rank}")
