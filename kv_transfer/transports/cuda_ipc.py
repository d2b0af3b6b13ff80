"""CUDA IPC, between GPU pools of one host: the puller opens the exporter's memory.

The exporter shares the handle and the generations' descriptor (pool_share.py). A pull is a copy by
the puller's GPU on a stream of its own, for which a copy thread waits. Then it checks the
generations, which are in CPU memory. The models of neither process wait for it.

Unlike a mapped memfd, memory whose owner has freed it or has died is undefined in CUDA. So the
connection over which the handle came stays open: the exporter keeps the allocation as long as its
process lives, and a read that finds the connection closed after its copy fails, even if the
generations, which outlive the exporter, still match. A dying process releases its GPU memory and
closes its sockets at almost the same time, in an unspecified order; what CUDA does in between is
the only thing here that depends on the driver. The end of the session closes the link in any case.
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
from kv_transfer.memory import GENERATION_BYTES, check_generations, map_sealed
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports.interface import Read, Reader, Source
from kv_transfer.transports.pool_share import PoolDescription, PoolShare, obtain_pool
from kv_transfer.transports.sockets import has_ended
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost, TransportUnavailable

log = logging.getLogger(__name__)


class CudaIpcServer:
    """Shares the pool's handle with pullers of the same user that have a session."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pool = device_pool(source.pool)
        self._share: PoolShare | None = None

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Start serving, and return the offer; both hosts are ignored."""
        pool = self._pool
        try:
            handle = pool.driver.export(pool.region.address)
        except DeviceError as error:
            raise TransportUnavailable(str(error)) from error
        description = PoolDescription(pool.num_blocks, pool.block_bytes, handle, pool.driver.bus_id)
        self._share = PoolShare(self._source, description, pool.fd, stays_open=True)
        return TransportOffer(name="cuda_ipc", endpoint=await self._share.start())

    async def close(self) -> None:
        """Stop sharing; reads in progress will fail."""
        if self._share is not None:
            await self._share.close()


class CudaIpcTransport:
    """Obtains handles, and opens each one once; `CudaIpcChannel` does the rest."""

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
        """Raises PeerLost: no access to the exporter, or our GPU cannot access its memory."""
        shared = await obtain_pool(offer.endpoint, welcome)
        try:
            size = welcome.num_blocks * GENERATION_BYTES
            generations = map_sealed(shared.fd, size).view(np.uint64)
            mapping = await self._mappings.open(welcome, shared.description)
        except BaseException:
            shared.sock.close()
            raise
        return CudaIpcChannel(
            shared.sock, mapping, generations, self._mappings, self._copier, self._threads
        )

    async def close(self) -> None:
        """Close the streams."""
        self._copier.close()


@dataclass(slots=True, eq=False)
class _Mapping:
    """The blocks of one exporter, opened here."""

    handle: bytes
    region: Region
    num_users: int = 0


class _Mappings:
    """The opened memory of exporters: once each, however many channels use it."""

    def __init__(self, driver: Driver, copier: SpanCopier, threads: CopyThreads) -> None:
        self._driver = driver
        self._copier = copier
        self._threads = threads
        self._open: dict[bytes, _Mapping] = {}
        self._changing = asyncio.Lock()  # two concurrent opens of one handle would leak one

    async def open(self, welcome: ExporterWelcome, description: PoolDescription) -> _Mapping:
        """Raises PeerLost: our GPU cannot access it, or it is smaller than announced."""
        if len(description.ipc_handle) != IPC_HANDLE_BYTES:
            raise PeerLost(
                f"received a handle of {len(description.ipc_handle)} bytes instead of "
                f"{IPC_HANDLE_BYTES}"
            )
        size = welcome.num_blocks * welcome.layout.block_bytes
        async with self._changing:
            mapping = self._open.get(description.ipc_handle)
            if mapping is not None and mapping.region.num_bytes != size:
                raise PeerLost(
                    f"memory of {mapping.region.num_bytes} bytes is announced as {size} bytes"
                )
            if mapping is None:
                mapping = _Mapping(
                    description.ipc_handle, await self._open_handle(description, size)
                )
                self._open[description.ipc_handle] = mapping
            mapping.num_users += 1
            return mapping

    async def close(self, mapping: _Mapping) -> None:
        """Remove a user; the last one closes the memory."""
        async with self._changing:
            mapping.num_users -= 1
            if mapping.num_users:
                return
            del self._open[mapping.handle]
            self._let_go(mapping.region)

    async def _open_handle(self, description: PoolDescription, num_bytes: int) -> Region:
        opened: list[Region] = []

        def open_and_probe() -> None:
            # The first call makes CUDA connect the two GPUs, which takes a while.
            opened.append(Region(self._driver.open(description.ipc_handle), num_bytes))
            self._copier.probe(opened[0])  # the size is only what the exporter claims

        try:
            await self._threads.run(open_and_probe, CancelFlag())
        except BaseException as error:
            for region in opened:  # too small, or cancelled
                self._let_go(region)
            if isinstance(error, DeviceError):
                raise PeerLost(f"the exporter's GPU {description.device}: {error}") from error
            raise
        return opened[0]

    def _let_go(self, region: Region) -> None:
        try:
            self._driver.close(region.address)
        except DeviceError as error:
            # Its owner may be dead. Nothing reads it any more in any case.
            log.warning("an exporter's memory could not be closed: %s", error)


class CudaIpcChannel:
    """One exporter's pool, opened here. Owns its use of the mapping, and its connection."""

    def __init__(
        self,
        exporter_alive: socket.socket,
        mapping: _Mapping,
        generations: NDArray[np.uint64],
        mappings: _Mappings,
        copier: SpanCopier,
        threads: CopyThreads,
    ) -> None:
        self._exporter_alive = exporter_alive  # open as long as the exporter keeps its memory
        self._mapping: _Mapping | None = mapping
        self._generations = generations
        self._mappings = mappings
        self._copier = copier
        self._threads = threads

    async def read(self, read: Read) -> None:
        """Copy the spans to the destination, then validate the generations.

        When cancelled, it waits for the copies that the GPU has started.
        """
        mapping = self._mapping
        if mapping is None:
            raise PeerLost("the channel is closed")
        self._check_exporter()
        cancel = CancelFlag()
        destination = device_pool(read.destination).region
        copy = partial(self._copier.copy, destination, mapping.region, read.spans, cancel)
        try:
            await self._threads.run(copy, cancel)
        except DeviceError as error:
            raise PeerLost(f"the copy from the exporter's GPU failed: {error}") from error
        self._check_exporter()
        check_generations(self._generations, read.block_ids, read.generations)

    async def close(self) -> None:
        """Close the exporter's memory. Idempotent."""
        mapping, self._mapping = self._mapping, None
        self._exporter_alive.close()
        if mapping is not None:
            await self._mappings.close(mapping)

    def _check_exporter(self) -> None:
        if has_ended(self._exporter_alive):
            raise PeerLost("the exporter has closed its pool or died; its GPU memory is undefined")
