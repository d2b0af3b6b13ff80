"""The rank that stands for a node's next host: `python -m pdserve.node.rank_hosts.carrier ORDER`.

To the other ranks of its host it is the last stage. It sends each step on, and brings back what
comes of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial

import msgspec

from kv_transfer.memory import map_own_pool
from pdserve import _native
from pdserve.engine.ranks.process import MAPPED, be_rank
from pdserve.engine.ranks.sizes import memory_bytes
from pdserve.node.rank_hosts.connecting import connect
from pdserve.node.rank_hosts.messages import CarrierOrder, HostAnswer
from pdserve.node.rank_hosts.stream import HostStream


def run_carrier(order: CarrierOrder, mapped_fd: int) -> None:
    """Be the next host, until this one has ended, or that one is lost.

    Raises:
        PeerLost: that one.
        RanksLost: a rank of this one.
        PdserveError: the next host cannot do what it is asked to.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal tells all; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    memory = _native.map_shared(order.memory_fd, memory_bytes(order.stages), writable=True)
    pool = map_own_pool(order.pool_fd, order.num_blocks, order.layout.block_bytes)
    os.close(order.memory_fd)
    os.close(order.pool_fd)
    os.write(mapped_fd, MAPPED)
    os.close(mapped_fd)
    stream = HostStream(asyncio.run(connect(order.address, order.tls_dir)))
    stream.send(order.to_next)
    stream.receive(HostAnswer).check()
    from pdserve.node.rank_hosts.carrying import carry_steps  # imports torch

    carry_steps(order, stream, memory, *pool)


if __name__ == "__main__":
    _order = msgspec.json.decode(sys.argv[1], type=CarrierOrder)
    be_rank(partial(run_carrier, _order), _order.parent, f"host {_order.address}")
