"""TCP, the exporter's end: sends the blocks of verified pulls over the requesting connection.

A thread is used only while bytes are copied, and released whenever the puller is not ready.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from kv_transfer.memory import cpu_pool
from kv_transfer.threads import CancelFlag, CopyThreads, slice_s
from kv_transfer.transports.interface import Source
from kv_transfer.transports.pull_server import PullLimits, PullServer, VerifiedPull
from kv_transfer.transports.sockets import wait_writable
from kv_transfer.transports.span_io import send_spans
from pdserve.protocol import TransportOffer


class TcpServer:
    """Serves one exporter's pool over TCP. Owns its threads."""

    def __init__(
        self, source: Source, limits: PullLimits | None = None, num_threads: int = 4
    ) -> None:
        self._source = source
        self._limits = limits or PullLimits()
        self._threads = CopyThreads(num_threads, "kv-send")
        self._server = PullServer("tcp", source, self._open_payload, self._limits, self._threads)

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Listen on a port of `host`; 0: on any free one."""
        return await self._server.start(host, advertised_host, port)

    async def close(self) -> None:
        """End all connections, even in the middle of a pull."""
        await self._server.close()
        self._threads.close()

    async def _open_payload(self, sock: socket.socket) -> _TcpPayload:
        return _TcpPayload(sock, self._source, self._threads, self._limits.stall_s)


class _TcpPayload:
    """Sends bytes on the connection itself, between the verdicts."""

    is_between_verdicts = True

    def __init__(
        self, sock: socket.socket, source: Source, threads: CopyThreads, stall_s: float
    ) -> None:
        self._sock = sock
        self._pool = cpu_pool(source.pool)
        self._statistics = source.statistics
        self._threads = threads
        self._stall_s = stall_s

    async def send(self, pull: VerifiedPull) -> None:
        """Send all bytes of the pull, in the order of its ranges."""
        cancel = CancelFlag()
        position = 0
        while position < pull.num_bytes:
            job = partial(
                send_spans,
                self._sock,
                self._pool.flat,
                pull.ranges,
                position,
                cancel,
                slice_s(pull.num_bytes),
            )
            before, position = position, await self._threads.move(job, cancel, pull.num_bytes)
            self._statistics.bytes_sent += position - before
            if position < pull.num_bytes:
                async with asyncio.timeout(self._stall_s):
                    await wait_writable(self._sock)

    async def close(self) -> None:
        """Nothing to release besides the connection."""
