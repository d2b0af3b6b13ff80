"""NCCL, the exporter's end: sends verified pulls through a communicator with each puller.

Requests and verdicts go over TCP (pull_server.py). Each connection has one communicator, with the
same lifetime. A puller that has lost it connects again and gets a new one.
"""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import msgspec

from kv_transfer.cuda.copier import SpanCopier
from kv_transfer.cuda.pool import device_pool
from kv_transfer.threads import CopyThreads
from kv_transfer.transports.frames import send_frame
from kv_transfer.transports.interface import Source
from kv_transfer.transports.nccl.peer import CHUNK_BYTES, EXPORTER_RANK, Endings, NcclPeer
from kv_transfer.transports.pull_server import PullLimits, PullServer, VerifiedPull
from kv_transfer.transports.sockets import watching_end
from pdserve.protocol import TransportOffer

# Each connection costs two chunks of GPU memory and a thread.
LIMITS = PullLimits(max_connections=64)
_JOIN_S = 30.0  # NCCL inspects the whole machine first
_NUM_THREADS = 2


class NcclServer:
    """Serves one exporter's pool to other GPUs. Owns its port, communicators and threads."""

    def __init__(
        self,
        source: Source,
        limits: PullLimits = LIMITS,
        chunk_bytes: int = CHUNK_BYTES,
        join_s: float = _JOIN_S,
    ) -> None:
        self._source = source
        self._limits = limits
        self._chunk_bytes = chunk_bytes
        self._join_s = join_s
        self._driver = device_pool(source.pool).driver
        self._copier = SpanCopier(self._driver)
        self._threads = CopyThreads(_NUM_THREADS, "kv-gather")
        self._endings = Endings()
        self._server = PullServer("nccl", source, self._open_payload, limits, self._threads)

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Listen on a port of `host`; 0: on any free one.

        The offer's metadata is the GPU's PCI address.
        """
        offer = await self._server.start(host, advertised_host, port)
        return msgspec.structs.replace(offer, metadata=self._driver.bus_id.encode())

    async def close(self) -> None:
        """End all connections and their communicators."""
        async with AsyncExitStack() as closing:  # closes all, even if one fails
            closing.callback(self._copier.close)
            closing.callback(self._threads.close)
            closing.push_async_callback(self._endings.wait)
            closing.push_async_callback(self._server.close)

    async def _open_payload(self, sock: socket.socket) -> _NcclPayload:
        peer = NcclPeer(self._driver, self._copier, self._threads, self._chunk_bytes)
        try:
            invitation = await peer.invite()
            await send_frame(sock, invitation)
            with watching_end(sock) as gone:
                await peer.join(invitation.communicator_id, EXPORTER_RANK, gone, self._join_s)
        except BaseException:
            self._endings.begin(peer)
            raise
        return _NcclPayload(sock, peer, self._endings, self._source, self._limits.stall_s)


class _NcclPayload:
    """Sends bytes through the communicator of a connection."""

    is_between_verdicts = False  # they go from GPU to GPU, once the puller has the verdict

    def __init__(
        self,
        sock: socket.socket,
        peer: NcclPeer,
        endings: Endings,
        source: Source,
        stall_s: float,
    ) -> None:
        self._sock = sock
        self._peer = peer
        self._endings = endings
        self._pool = device_pool(source.pool).region
        self._statistics = source.statistics
        self._stall_s = stall_s

    async def send(self, pull: VerifiedPull) -> None:
        """Send all bytes of the pull, in the order of its ranges."""
        with watching_end(self._sock) as gone:
            await self._peer.send(self._pool, pull.ranges, gone, self._stall_s)
        self._statistics.bytes_sent += pull.num_bytes

    async def close(self) -> None:
        """The connection has ended, and its socket is closed."""
        self._endings.begin(self._peer)
