"""A rank other than 0: `python -m pdserve.node.device_ranks.process ORDER`.

It loads its share of the weights, and computes the steps that rank 0 writes, until it is killed: it
ends with rank 0, and has nothing to put in order.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import msgspec

from pdserve import _native
from pdserve.engine.ranks.process import MAPPED, be_rank
from pdserve.engine.ranks.sizes import memory_bytes
from pdserve.node.device_ranks.order import DeviceRankOrder


def run_device_rank(order: DeviceRankOrder, mapped_fd: int) -> None:
    """Be a rank, until rank 0 has ended, or gives up.

    Raises:
        PdserveError: the weights or the device cannot be used.
        RanksLost: another rank has ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal tells all; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    memory = _native.map_shared(order.memory_fd, memory_bytes(order.stages), writable=True)
    os.close(order.memory_fd)
    pool = None
    if order.pool_fd >= 0:  # before it is sealed
        num_bytes = order.num_blocks * order.layout.block_bytes
        pool = _native.map_shared(order.pool_fd, num_bytes, writable=True)
        os.close(order.pool_fd)
    os.write(mapped_fd, MAPPED)
    os.close(mapped_fd)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    from pdserve.node.device_ranks.following import follow_steps  # imports torch

    follow_steps(order, memory, pool)


if __name__ == "__main__":
    _order = msgspec.json.decode(sys.argv[1], type=DeviceRankOrder)
    be_rank(partial(run_device_rank, _order), _order.parent, f"rank {_order.rank}")
