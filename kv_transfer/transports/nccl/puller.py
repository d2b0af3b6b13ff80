"""NCCL, the puller's end: for GPUs of any hosts, if no better transport connects them.

There is one communicator per exporter, which serves one pull after the other. It belongs to a
control connection (`server.py`). After a failed pull both are dropped, and the next pull starts
with new ones. `NcclPeer.receive` provides the guarantee of `Channel.read`.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kv_transfer.cuda.copier import SpanCopier
from kv_transfer.cuda.driver import Driver
from kv_transfer.cuda.pool import device_pool
from kv_transfer.threads import CopyThreads
from kv_transfer.transports.frames import receive_frame
from kv_transfer.transports.interface import Read, Reader
from kv_transfer.transports.nccl.peer import (
    MAX_INVITATION_BYTES,
    PULLER_RANK,
    Endings,
    Invitation,
    NcclPeer,
)
from kv_transfer.transports.pull_client import Unanswered, ask, dial, lending, receive_final_verdict
from kv_transfer.transports.sockets import watching_end
from kv_transfer.transports.tls import NodeTls
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost

_JOIN_S = 30.0  # the caller's deadline is usually shorter
_STALL_S = 10.0  # without a chunk


class NcclTransport:
    """Joins a communicator to check that it works; `NcclChannel` does the rest."""

    name = "nccl"

    def __init__(
        self, reader: Reader, stall_s: float = _STALL_S, endings: Endings | None = None
    ) -> None:
        driver = device_pool(reader.pool).driver
        self._host_id = reader.host_id
        endings = endings or Endings()
        self._shared = _Shared(
            driver, SpanCopier(driver), reader.threads, endings, stall_s, reader.tls
        )

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """NCCL refuses two processes on one GPU."""
        bus_id = self._shared.driver.bus_id
        if welcome.host_id == self._host_id and offer.metadata == bus_id.encode():
            return f"both processes are on GPU {bus_id}, which NCCL refuses"
        return None

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> NcclChannel:
        """Raises PeerLost: nobody listens, or NCCL cannot connect the two GPUs."""
        channel = NcclChannel(offer.endpoint, welcome.access, self._shared)
        await channel.open()
        return channel

    async def close(self) -> None:
        """Wait some time for dropped communicators to end, and close the streams."""
        await self._shared.endings.wait()
        self._shared.copier.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What all channels of a transport share."""

    driver: Driver
    copier: SpanCopier
    threads: CopyThreads
    endings: Endings
    stall_s: float
    tls: NodeTls | None


@dataclass(frozen=True, slots=True, eq=False)
class _Pairing:
    """A control connection and its communicator."""

    sock: socket.socket
    peer: NcclPeer


class NcclChannel:
    """Owns one pairing at a time; a read takes it, and returns it if it succeeds."""

    def __init__(self, endpoint: str, access: bytes, shared: _Shared) -> None:
        self._endpoint = endpoint
        self._access = access
        self._shared = shared
        self._turn = asyncio.Lock()  # both ends of a communicator must agree on the order
        self._idle: _Pairing | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Prepare a pairing. Raises PeerLost."""
        self._idle = await self._pair()

    async def read(self, read: Read) -> None:
        """Copy the spans to the destination, then validate the generations."""
        async with self._turn:
            if self._is_closed:
                raise PeerLost("the channel is closed")
            pairing, self._idle = self._idle, None
            if pairing is not None:
                # If the exporter has closed an idle connection, nothing was sent: try a new one.
                with suppress(Unanswered):
                    await self._read_on(pairing, read)
                    return
            await self._read_on(await self._pair(), read)

    async def close(self) -> None:
        """End the communicator, in the background."""
        self._is_closed = True
        if self._idle is not None:
            self._drop(self._idle)
            self._idle = None

    async def _read_on(self, pairing: _Pairing, read: Read) -> None:
        sock, peer = pairing.sock, pairing.peer
        destination = device_pool(read.destination).region
        with lending(partial(self._take_back, pairing), partial(self._drop, pairing)):
            try:
                await ask(sock, read, self._endpoint)
                with watching_end(sock) as gone:
                    await peer.receive(destination, read.spans[:, 1:], gone, self._shared.stall_s)
                await receive_final_verdict(sock)
            except OSError as error:
                raise PeerLost(f"the connection to {self._endpoint} broke: {error}") from error

    def _take_back(self, pairing: _Pairing) -> None:
        self._idle = pairing

    def _drop(self, pairing: _Pairing) -> None:
        pairing.sock.close()
        self._shared.endings.begin(pairing.peer)

    async def _pair(self) -> _Pairing:
        sock = await dial(self._endpoint, self._access, self._shared.tls)
        peer: NcclPeer | None = None
        try:
            invitation = await receive_frame(sock, Invitation, MAX_INVITATION_BYTES)
            invitation.check()
            shared = self._shared
            peer = NcclPeer(shared.driver, shared.copier, shared.threads, invitation.chunk_bytes)
            with watching_end(sock) as gone:
                await peer.join(invitation.communicator_id, PULLER_RANK, gone, _JOIN_S)
        except BaseException as error:
            sock.close()
            if peer is not None:
                self._shared.endings.begin(peer)
            if isinstance(error, OSError):
                raise PeerLost(f"the connection to {self._endpoint} broke: {error}") from error
            raise
        return _Pairing(sock, peer)
