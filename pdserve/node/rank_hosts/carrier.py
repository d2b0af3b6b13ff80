"""The rank that stands for a node's next host: `python -m pdserve.node.rank_hosts.carrier ORDER`.

To the other ranks of its host it is the last stage. It sends each step on, and brings back what
comes of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from kv_transfer.memory import map_own_pool
from kv_transfer.transports.tls import NodeTls
from pdserve import _native
from pdserve.addresses import split_address
from pdserve.engine.ranks.process import MAPPED
from pdserve.engine.ranks.sizes import memory_bytes
from pdserve.errors import PdserveError, PeerLost
from pdserve.node.rank_hosts.messages import CarrierOrder, HostAnswer
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.process.parent_death import die_with_parent

CONNECT_S: Final = 60.0  # until the next host must listen
_AGAIN_S: Final = 0.2


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
    stream = asyncio.run(connect(order.address, order.tls_dir))
    stream.send(order.to_next)
    stream.receive(HostAnswer).check()
    from pdserve.node.rank_hosts.carrying import carry_steps  # imports torch

    carry_steps(order, stream, memory, *pool)


async def connect(address: str, tls_dir: str) -> HostStream:
    """Connect to a host of this node as soon as it listens.

    Raises:
        PeerLost: it does not within CONNECT_S, or shows no certificate that is trusted.
    """
    host, port = split_address(address)
    tls = NodeTls(Path(tls_dir)) if tls_dir else None
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
            if tls is not None:
                sock.setblocking(False)
                sock = await tls.connect(sock)
            return HostStream(sock)
        except OSError as error:
            if time.monotonic() > end_s:
                raise PeerLost(f"no pdserve rank at {address}: {error}") from error
            await asyncio.sleep(_AGAIN_S)


def _main(order: CarrierOrder) -> None:
    die_with_parent(order.parent)
    try:
        run_carrier(order, sys.stdout.fileno())
    except _native.RanksLost:
        sys.exit(1)  # whoever was first has said why
    except PdserveError as error:
        sys.stderr.write(f"pdserve: error: the host {order.address} of this node: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1], type=CarrierOrder))
