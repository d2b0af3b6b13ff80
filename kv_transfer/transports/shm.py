"""Shared memory: the puller maps the exporter's pool read-only, and copies from it.

The exporter shares the pool's descriptor (pool_share.py). After that its CPU takes no part: pulls
work while the exporter is stopped, and even after its death. Its memory, including the generations,
then does not change any more, so what validates is correct. The mapping keeps the memory alive
until the channel is closed.
"""

from __future__ import annotations

from functools import partial

from kv_transfer.memory import STALE, RemotePool, check_generations, cpu_pool, stale_of
from kv_transfer.threads import CopyThreads
from kv_transfer.transports.block_read import BlockRead
from kv_transfer.transports.interface import Read, Reader, Source
from kv_transfer.transports.pool_share import PoolDescription, PoolShare, obtain_pool
from pdserve import _native
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost


class ShmServer:
    """Shares the pool's descriptor with pullers of the same user that have a session."""

    def __init__(self, source: Source) -> None:
        pool = cpu_pool(source.pool)
        self._share = PoolShare(source, PoolDescription(pool.num_blocks, pool.block_bytes), pool.fd)

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Start serving, and return the offer; both hosts are ignored."""
        return TransportOffer(name="shm", endpoint=await self._share.start())

    async def close(self) -> None:
        """Stop sharing. Pullers that have mapped the pool keep their mappings."""
        await self._share.close()


class ShmTransport:
    """Obtains the descriptor; `ShmChannel` does the rest."""

    name = "shm"

    def __init__(self, reader: Reader) -> None:
        self._threads = reader.threads
        self._host_id = reader.host_id
        _native.copy_rates()  # measures now, and not in the first pull

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """Processes share memory on one host only."""
        return None if welcome.host_id == self._host_id else "another host"

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> ShmChannel:
        """Raises PeerLost: nobody listens, another user, or a pool other than in the welcome."""
        shared = await obtain_pool(offer.endpoint, welcome)
        shared.sock.close()
        pool = RemotePool(shared.fd, welcome.num_blocks, welcome.layout.block_bytes)
        return ShmChannel(pool, self._threads)

    async def close(self) -> None:
        """Nothing is shared."""


class ShmChannel:
    """One exporter's pool, mapped here. A read is one native copy without the interpreter lock."""

    def __init__(self, pool: RemotePool, threads: CopyThreads) -> None:
        self._pool: RemotePool | None = pool
        self._threads = threads

    async def read(self, read: Read) -> None:
        """Copy the spans to the destination, then validate the generations.

        The exporter takes no part, so PeerLost does not occur.
        """
        pool = self._pool
        if pool is None:
            raise PeerLost("the channel is closed")
        destination = cpu_pool(read.destination).flat
        summing = read.summing
        if summing is not None and summing.spans is not None:
            sums = (summing.spans, summing.places, summing.begin())
            copy = partial(_native.copy_summed, destination, pool.flat, *sums)
        else:
            copy = partial(_native.copy_spans, destination, pool.flat, read.spans)
        await self._threads.copy(copy, read.num_bytes)
        check_generations(pool.generations, read.block_ids, read.generations)
        if summing is not None:
            summing.is_done = summing.spans is not None

    async def read_blocks(self, read: BlockRead) -> None:
        """As `read`, in one call on the event loop, which compares their sums, too."""
        pool = self._pool
        if pool is None:
            raise PeerLost("the channel is closed")
        rows = read.rows
        found = _native.copy_blocks(
            read.destination.flat,
            pool.flat,
            rows.block_bytes,
            read.destination_ids,
            read.source_ids,
            rows.rows,
            rows.last_rows,
            pool.generations,
            read.generations,
            read.sums,
        )
        if found == STALE:
            raise stale_of(pool.generations, read.source_ids, read.generations)
        read.wrong = found

    async def close(self) -> None:
        """Unmap."""
        self._pool = None
