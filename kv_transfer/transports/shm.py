"""Same host: the exporter hands out its pool's descriptor, the puller maps it read-only and copies.

The descriptor comes through the pool's door (pool_door.py). After that the exporter's CPU takes no
part: a pull goes on while the exporter is stopped, and even when it has died - its memory then
stands still, generations included, so what validates is what the ticket means. The mapping holds
that memory until the channel is closed.
"""

from __future__ import annotations

from functools import partial

from kv_transfer.generations import check_generations
from kv_transfer.memory import RemotePool, cpu_pool
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports.interface import Read, Reader, Source
from kv_transfer.transports.pool_door import PoolCard, PoolDoor, knock
from pdserve import _native
from pdserve.errors import PeerLost
from pdserve.protocol import ExporterWelcome, TransportOffer


class ShmServer:
    """Gives the pool's descriptor to every puller of the same user that has a session."""

    def __init__(self, source: Source) -> None:
        pool = cpu_pool(source.pool)
        self._door = PoolDoor(source, PoolCard(pool.num_blocks, pool.block_bytes), pool.fd)

    async def start(self, host: str, advertised_host: str) -> TransportOffer:
        """Open the door; both hosts are ignored."""
        return TransportOffer(name="shm", endpoint=await self._door.start())

    async def close(self) -> None:
        """Close the door. Pools handed out stay mapped where they are."""
        await self._door.close()


class ShmTransport:
    """Obtains the descriptor; `ShmChannel` does the rest."""

    name = "shm"

    def __init__(self, reader: Reader) -> None:
        self._threads = reader.threads
        self._host_id = reader.host_id

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """Processes share memory on one host only."""
        return None if welcome.host_id == self._host_id else "another host"

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> ShmChannel:
        """Raises PeerLost: nobody there, another user, or what came is not the welcome's pool."""
        handover = await knock(offer.endpoint, welcome)
        handover.sock.close()
        pool = RemotePool(handover.fd, welcome.num_blocks, welcome.layout.block_bytes)
        return ShmChannel(pool, self._threads)

    async def close(self) -> None:
        """Nothing is shared."""


class ShmChannel:
    """One exporter's pool, mapped here. A pull is one native copy off the interpreter lock."""

    def __init__(self, pool: RemotePool, threads: CopyThreads) -> None:
        self._pool: RemotePool | None = pool
        self._threads = threads

    async def read(self, read: Read) -> None:
        """As Channel.read; the exporter takes no part, so PeerLost does not occur."""
        pool = self._pool
        if pool is None:
            raise PeerLost("the channel is closed")
        cancel = CancelFlag()
        destination = cpu_pool(read.destination).flat
        copy = partial(_native.copy_spans, destination, pool.flat, read.spans, cancel.byte)
        await self._threads.move(copy, cancel, read.num_bytes)
        check_generations(pool.generations, read.block_ids, read.generations)

    async def close(self) -> None:
        """Unmap."""
        self._pool = None
