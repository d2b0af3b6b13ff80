"""UCX through NIXL, the puller's end: reads the exporter's memory by RDMA or through the kernel.

    same host, both on CPUs    cross-memory attach: the kernel copies, the exporter takes no part
    same host, both on GPUs    CUDA IPC, inside of UCX                     (not run yet)
    any host, RDMA devices     RDMA, with GPUDirect where pools are GPUs'  (not run yet)

Never TCP: our own is faster and safer, and UCX is configured without it (`agent.py`).

To connect, the puller opens a control connection (`server.py`), reads a generation while the
exporter polls its agent, tells the exporter that it is connected, and reads another generation to
check that polling is not needed any more. The control connection stays open: its end means that the
exporter is gone. A pull is two reads: the spans, and then the generations of their blocks.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.memory import GENERATION_BYTES, check_read_generations
from kv_transfer.spans.plan import Spans
from kv_transfer.transports.interface import Read, Reader
from kv_transfer.transports.pull_client import dial
from kv_transfer.transports.sockets import has_ended, receive_exactly, send_all
from kv_transfer.transports.ucx.agent import NixlAgent, UcxRegion, pid_namespace, rdma_devices
from kv_transfer.transports.ucx.driver import UcxDriver
from kv_transfer.transports.ucx.offer import CONNECTED, UcxOffer, blocks_of
from kv_transfer.transports.ucx.transfer import Peer
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost

_PROBE_S = 1.0  # takes a few microseconds if it works
_MAX_GAP = 64  # unneeded generations between two needed ones that are read along, not skipped


class UcxTransport:
    """Owns the driver of one agent, with which `UcxChannel` reads."""

    name = "ucx"

    def __init__(self, reader: Reader) -> None:
        self._host_id = reader.host_id
        self._tls = reader.tls
        self._memory = reader.pool.kind
        self._blocks = blocks_of(reader.pool)
        self._driver = UcxDriver(partial(NixlAgent, reader.name), self._blocks)

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """UCX needs RDMA devices on both sides, or one host and one kind of memory."""
        try:
            theirs = UcxOffer.read(offer.metadata)
        except PeerLost as error:
            return error.message
        if theirs.has_rdma and rdma_devices():
            return None
        if welcome.host_id != self._host_id:
            return "another host, and not both have an RDMA device"
        if welcome.memory != self._memory:
            return f"{welcome.memory} to {self._memory} memory takes RDMA devices on both sides"
        if theirs.pid_namespace != pid_namespace():
            return "another PID namespace: the kernel copies between processes within one only"
        return None

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> UcxChannel:
        """Open a channel, and check that it works.

        Also raises TransportUnavailable: this process cannot use UCX.
        """
        theirs = UcxOffer.read(offer.metadata)
        with ExitStack() as undo:
            sock = await dial(offer.endpoint, welcome.access, self._tls)
            control = undo.enter_context(sock)
            peer = await self._driver.connect(theirs.agent, theirs.agent_metadata)
            channel = UcxChannel(self._driver, peer, theirs, welcome, self._blocks, control)
            try:
                await channel.probe()
                await _say_connected(control)
                await channel.probe()
            except BaseException:
                await channel.close()
                raise
            undo.pop_all()
            return channel

    async def close(self) -> None:
        """Destroy the agent and end its thread."""
        await self._driver.close()


class UcxChannel:
    """One exporter's pool and generations, which our agent can read."""

    def __init__(
        self,
        driver: UcxDriver,
        peer: Peer,
        offer: UcxOffer,
        welcome: ExporterWelcome,
        destination: UcxRegion,
        control: socket.socket,
    ) -> None:
        self._driver = driver
        self._peer = peer
        self._blocks = offer.blocks_of(welcome)
        self._generations = offer.generations_of(welcome)
        self._destination = destination
        self._control: socket.socket | None = control

    async def read(self, read: Read) -> None:
        """Copy the spans to the destination, then validate the generations.

        When cancelled, it waits for the few megabytes that are in flight.
        """
        if self._control is None:
            raise PeerLost("the channel is closed")
        if has_ended(self._control):
            raise PeerLost(f"{self._peer.name} has hung up")
        await self._driver.transfer(self._peer, self._blocks, self._destination, read.spans)
        if self._blocks.segment == "VRAM" and has_ended(self._control):
            raise PeerLost(f"{self._peer.name} has hung up; its GPU memory is undefined")
        await self._validate(read.block_ids, read.generations)

    async def probe(self) -> None:
        """Raises PeerLost: the exporter's memory cannot be read."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._read_generations(np.array([[0, 0, GENERATION_BYTES]]))
        except TimeoutError as error:
            raise PeerLost("reading a generation over UCX did not end in time") from error

    async def close(self) -> None:
        """Close the control connection, and disconnect our agent. Idempotent."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
            await self._driver.disconnect(self._peer)

    async def _validate(self, block_ids: NDArray[np.int64], expected: NDArray[np.uint64]) -> None:
        """As check_generations, with the exporter's current generations."""
        unique, of_block = np.unique(block_ids, return_inverse=True)
        spans, places = _generation_spans(unique)
        found = (await self._read_generations(spans))[places[of_block]]
        check_read_generations(found, block_ids, expected)

    async def _read_generations(self, spans: Spans) -> NDArray[np.uint64]:
        async with self._driver.scratch(int(spans[:, 2].sum()) // GENERATION_BYTES) as scratch:
            region = UcxRegion.of(scratch)
            await self._driver.transfer(self._peer, self._generations, region, spans)
            return scratch.copy()


async def _say_connected(control: socket.socket) -> None:
    """Tell the exporter to stop polling for us, and wait until it has. Raises PeerLost."""
    try:
        await send_all(control, CONNECTED)
        answer = await receive_exactly(control, len(CONNECTED))
    except OSError as error:
        raise PeerLost(f"the exporter has hung up: {error}") from error
    if answer != CONNECTED:
        raise PeerLost("the exporter has hung up")


def _generation_spans(unique: NDArray[np.int64]) -> tuple[Spans, NDArray[np.int64]]:
    """(spans, places) for ascending block ids.

    The spans copy the exporter's generations into an array without gaps, where the generation of
    block `unique[i]` is at `places[i]`.
    """
    borders = np.flatnonzero(np.diff(unique) > _MAX_GAP) + 1
    starts = unique[np.concatenate([[0], borders])]
    ends = unique[np.concatenate([borders, [len(unique)]]) - 1] + 1
    offsets = np.cumsum(ends - starts) - (ends - starts)
    spans = np.stack([starts, offsets, ends - starts], axis=1) * GENERATION_BYTES
    run = np.searchsorted(starts, unique, side="right") - 1
    return spans, unique - starts[run] + offsets[run]
