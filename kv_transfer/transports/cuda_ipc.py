"""Same host, both pools on GPUs: the puller opens the exporter's memory through CUDA IPC.

The handle and the generations' descriptor come through the pool's door (pool_door.py). A pull is a
copy by the puller's GPU on a stream of its own, which a copy thread waits for; then it looks at the
generations, which are CPU memory. Neither process's model ever waits for it.

CUDA promises nothing about memory whose owner has freed it or has died, unlike a mapped memfd. So
the door stays open as a witness: the exporter keeps its allocation as long as its process lives,
and a read that finds the door shut after its copy is not believed, although the generations, which
outlive the exporter, may still fit. A process that dies gives its GPU memory back and hangs up
within moments of each other, in an order that nobody promises; what CUDA does between is the one
thing here that rests on the driver. The end of the session closes the link in any case.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.copier import SpanCopier
from kv_transfer.cuda.driver import IPC_HANDLE_BYTES, DeviceError, Driver, Region
from kv_transfer.cuda.pool import device_pool
from kv_transfer.generations import check_generations
from kv_transfer.memory import GENERATION_BYTES, map_sealed
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports.interface import Read, Reader, Source
from kv_transfer.transports.pool_door import PoolCard, PoolDoor, knock
from kv_transfer.transports.sockets import has_ended
from pdserve.errors import PeerLost, TransportUnavailable
from pdserve.protocol import ExporterWelcome, TransportOffer

logger = logging.getLogger(__name__)


class CudaIpcServer:
    """Gives the pool's handle to every puller of the same user that has a session."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pool = device_pool(source.pool)
        self._door: PoolDoor | None = None

    async def start(self, host: str, advertised_host: str) -> TransportOffer:
        """Open the door; both hosts are ignored."""
        pool = self._pool
        try:
            handle = pool.driver.export(pool.region.address)
        except DeviceError as error:
            raise TransportUnavailable(str(error)) from error
        card = PoolCard(pool.num_blocks, pool.block_bytes, handle, pool.driver.bus_id)
        self._door = PoolDoor(self._source, card, pool.fd, stays_open=True)
        return TransportOffer(name="cuda_ipc", endpoint=await self._door.start())

    async def close(self) -> None:
        """Close the door: reads that are under way will not be believed."""
        if self._door is not None:
            await self._door.close()


class CudaIpcTransport:
    """Obtains and opens handles, each once; `CudaIpcChannel` does the rest."""

    name = "cuda_ipc"

    def __init__(self, reader: Reader) -> None:
        pool = device_pool(reader.pool)
        self._host_id = reader.host_id
        self._threads = reader.threads
        self._copier = SpanCopier(pool.driver)
        self._mappings = _Mappings(pool.driver, self._copier, reader.threads)

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """CUDA IPC works on one host only."""
        return None if welcome.host_id == self._host_id else "another host"

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> CudaIpcChannel:
        """Raises PeerLost: no access to the exporter, or none of our GPU to its memory."""
        handover = await knock(offer.endpoint, welcome)
        try:
            size = welcome.num_blocks * GENERATION_BYTES
            generations = map_sealed(handover.fd, size).view(np.uint64)
            mapping = await self._mappings.open(welcome, handover.card)
        except BaseException:
            handover.sock.close()
            raise
        return CudaIpcChannel(
            handover.sock, mapping, generations, self._mappings, self._copier, self._threads
        )

    async def close(self) -> None:
        """Let go of the streams."""
        self._copier.close()


@dataclass(slots=True, eq=False)
class _Mapping:
    """One exporter's blocks, opened here."""

    handle: bytes
    region: Region
    num_users: int = 0


class _Mappings:
    """What is open: each exporter's memory once, however many channels use it."""

    def __init__(self, driver: Driver, copier: SpanCopier, threads: CopyThreads) -> None:
        self._driver = driver
        self._copier = copier
        self._threads = threads
        self._open: dict[bytes, _Mapping] = {}
        self._changing = asyncio.Lock()  # two opens of one handle at a time would leave one behind

    async def open(self, welcome: ExporterWelcome, card: PoolCard) -> _Mapping:
        """Raises PeerLost: our GPU cannot get at it, or there is less than was announced."""
        if len(card.ipc_handle) != IPC_HANDLE_BYTES:
            raise PeerLost(
                f"received a handle of {len(card.ipc_handle)} bytes: {IPC_HANDLE_BYTES} are one"
            )
        size = welcome.num_blocks * welcome.layout.block_bytes
        async with self._changing:
            mapping = self._open.get(card.ipc_handle)
            if mapping is not None and mapping.region.num_bytes != size:
                raise PeerLost(
                    f"memory that was {mapping.region.num_bytes} bytes is said to be {size} now"
                )
            if mapping is None:
                mapping = _Mapping(card.ipc_handle, await self._open_handle(card, size))
                self._open[card.ipc_handle] = mapping
            mapping.num_users += 1
            return mapping

    async def close(self, mapping: _Mapping) -> None:
        """One user less; the last one closes it."""
        async with self._changing:
            mapping.num_users -= 1
            if mapping.num_users:
                return
            del self._open[mapping.handle]
            self._let_go(mapping.region)

    async def _open_handle(self, card: PoolCard, num_bytes: int) -> Region:
        opened: list[Region] = []

        def open_and_probe() -> None:
            # The first one makes CUDA connect the two GPUs, which takes a while.
            opened.append(Region(self._driver.open(card.ipc_handle), num_bytes))
            self._copier.probe(opened[0])  # how large it is, only the exporter has said

        try:
            await self._threads.run(open_and_probe, CancelFlag())
        except BaseException as error:
            for region in opened:  # too small, or too late to be used
                self._let_go(region)
            if isinstance(error, DeviceError):
                raise PeerLost(f"the exporter's GPU {card.device}: {error}") from error
            raise
        return opened[0]

    def _let_go(self, region: Region) -> None:
        try:
            self._driver.close(region.address)
        except DeviceError as error:
            # Its owner may be dead. Nothing is read through it any more in any case.
            logger.warning("an exporter's memory could not be closed: %s", error)


class CudaIpcChannel:
    """One exporter's pool, opened here. Owns its use of the mapping, and its place at the door."""

    def __init__(
        self,
        door: socket.socket,
        mapping: _Mapping,
        generations: NDArray[np.uint64],
        mappings: _Mappings,
        copier: SpanCopier,
        threads: CopyThreads,
    ) -> None:
        self._door = door
        self._mapping: _Mapping | None = mapping
        self._generations = generations
        self._mappings = mappings
        self._copier = copier
        self._threads = threads

    async def read(self, read: Read) -> None:
        """As Channel.read. When cancelled, it waits for what the GPU has been given to do."""
        mapping = self._mapping
        if mapping is None:
            raise PeerLost("the channel is closed")
        self._check_door()
        cancel = CancelFlag()
        destination = device_pool(read.destination).region
        copy = partial(self._copier.copy, destination, mapping.region, read.spans, cancel)
        try:
            await self._threads.run(copy, cancel)
        except DeviceError as error:
            raise PeerLost(f"the copy from the exporter's GPU failed: {error}") from error
        self._check_door()
        check_generations(self._generations, read.block_ids, read.generations)

    async def close(self) -> None:
        """Let go of the exporter's memory. Idempotent."""
        mapping, self._mapping = self._mapping, None
        self._door.close()
        if mapping is not None:
            await self._mappings.close(mapping)

    def _check_door(self) -> None:
        if has_ended(self._door):
            raise PeerLost("the exporter has closed its pool or died; its GPU memory is not ours")
