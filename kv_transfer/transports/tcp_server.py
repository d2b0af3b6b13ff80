"""TCP, the exporter's end: sends the blocks of verified pulls over the requesting connection.

A thread is used only while bytes are copied or coded, and released whenever the puller is not
ready. The kernel sends one chunk while the next one is coded.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.catalog import codecs_for
from kv_transfer.codecs.chunks import CODING_COSTS, Encoder
from kv_transfer.memory import cpu_pool
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag, CopyThreads, slice_s
from kv_transfer.transports.block_read import planner_of
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
        self._server = PullServer(
            "tcp",
            source,
            self._open_payload,
            self._limits,
            self._threads,
            codecs_for(source.layout),
            planner_of(source.layout, source.pool),
        )

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
        self._pool = cpu_pool(source.pool).flat
        self._layout = source.layout
        self._statistics = source.statistics
        self._threads = threads
        self._stall_s = stall_s

    async def send(self, pull: VerifiedPull) -> None:
        """Send all bytes of the pull, in the order of its ranges."""
        if pull.codec is None:
            await self._send(self._pool, pull.ranges, pull.num_bytes)
            return
        encoder = Encoder(pull.codec, self._pool, pull.ranges, self._layout)
        while size := encoder.next_bytes:
            chunk = await self._threads.move(encoder.next, CancelFlag(), CODING_COSTS * size)
            await self._send(chunk, np.array([[0, len(chunk)]]), len(chunk))

    async def _send(self, region: NDArray[np.uint8], ranges: Spans, num_bytes: int) -> None:
        cancel = CancelFlag()
        position = 0
        while position < num_bytes:
            job = partial(
                send_spans, self._sock, region, ranges, position, cancel, slice_s(num_bytes)
            )
            before, position = position, await self._threads.move(job, cancel, num_bytes)
            self._statistics.bytes_sent += position - before
            if position < num_bytes:
                async with asyncio.timeout(self._stall_s):
                    await wait_writable(self._sock)

    async def close(self) -> None:
        """Nothing to release besides the connection."""
