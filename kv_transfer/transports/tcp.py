"""TCP, the puller's end: a connection for each small read in flight, or part of a large one.

Idle connections are reused. If a read does not complete, its connections are closed. That is the
fence: nothing can be received from a closed socket.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.catalog import codecs_for
from kv_transfer.codecs.choice import Sending
from kv_transfer.codecs.chunks import CODING_COSTS, HEAD, Decoder
from kv_transfer.codecs.codec import RAW
from kv_transfer.memory import cpu_pool
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag, slice_s, together
from kv_transfer.transports.block_read import BlockRead
from kv_transfer.transports.interface import Read, Reader
from kv_transfer.transports.pull_client import (
    Unanswered,
    ask,
    dial,
    lending,
    receive_few,
    receive_final_verdict,
    receive_first_verdict,
)
from kv_transfer.transports.sockets import Watch, receive_exactly, wait_readable
from kv_transfer.transports.span_io import receive_spans
from kv_transfer.transports.split_read import split_read
from pdserve.kv import KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost

_MAX_IDLE = 8  # connections kept for further reads

# One connection keeps at most one core busy at either end, and each waits for the other in between.
_NUM_STREAMS = 2
# For fewer bytes, a second request costs more than it gains.
_STREAMED_BYTES = 16 << 20


class _Connection:
    """One connection to an exporter, which has let us in."""

    __slots__ = ("sock", "watch")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.watch = Watch(sock)

    def close(self) -> None:
        self.watch.stop()
        self.sock.close()


class TcpTransport:
    """Opens a connection to check that it works; `TcpChannel` does the rest."""

    name = "tcp"

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """None: it works everywhere."""
        return None

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> TcpChannel:
        """Raises PeerLost: nobody listens there."""
        channel = TcpChannel(offer.endpoint, welcome, self._reader)
        await channel.open()
        return channel

    async def close(self) -> None:
        """Nothing is shared."""


class TcpChannel:
    """Connections to one exporter. Owns the idle ones; a read owns those that it uses."""

    def __init__(self, endpoint: str, exporter: ExporterWelcome, reader: Reader) -> None:
        self._endpoint = endpoint
        self._access = exporter.access
        self._layout: KvLayout = exporter.layout
        self._threads = reader.threads
        self._tls = reader.tls
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def open(self) -> None:
        """Prepare one connection. Raises PeerLost."""
        self._idle.append(await self._dial())

    async def read(self, read: Read) -> None:
        """Copy the spans to the destination, then validate the generations.

        If one part fails, so does the read, once the other has ended too.
        """
        if read.num_bytes < _STREAMED_BYTES:
            await self._read_part(read)
            return
        parts = split_read(read, self._layout, _NUM_STREAMS)
        await together([self._read_part(part) for part in parts])

    async def read_blocks(self, read: BlockRead) -> None:
        """As `read`, but the blocks and both verdicts arrive in one call, if all are there."""
        if self._tls is not None:
            await self._read_part(read.planned())
        else:
            await self._read_part(read)

    async def _read_part(self, read: Read | BlockRead) -> None:
        if self._idle:
            # If the exporter has closed an idle connection, nothing was received: try a new one.
            with suppress(Unanswered):
                await self._read_on(self._idle.pop(), read)
                return
        await self._read_on(await self._dial(), read)

    async def close(self) -> None:
        """Close the idle connections."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    async def _dial(self) -> _Connection:
        return _Connection(await dial(self._endpoint, self._access, self._tls))

    async def _read_on(self, connection: _Connection, read: Read | BlockRead) -> None:
        sock, watch = connection.sock, connection.watch
        with lending(partial(self._take_back, connection), connection.close):
            try:
                if isinstance(read, BlockRead):
                    if await receive_few(sock, watch, read, self._endpoint):
                        return
                    read = read.planned()
                    await receive_first_verdict(sock, read.num_bytes, self._endpoint)
                else:
                    watch.stop()
                    await ask(sock, read, self._endpoint)
                await self._receive(sock, read)
                await receive_final_verdict(sock)
            except OSError as error:
                raise PeerLost(f"the connection to {self._endpoint} broke: {error}") from error

    async def _receive(self, sock: socket.socket, read: Read) -> None:
        into = np.ascontiguousarray(read.spans[:, 1:])  # [n, 2] (offset, nbytes)
        destination = cpu_pool(read.destination).flat
        sending = read.sending or Sending()
        if sending.codec == RAW:
            await self._receive_spans(sock, destination, into, read.num_bytes)
            sending.num_bytes += read.num_bytes
            sending.arrived += read.num_bytes
            return
        decoder = Decoder(codecs_for(self._layout)[sending.codec], destination, into)
        while not decoder.is_over:
            size, coded_bytes = decoder.check(await receive_exactly(sock, HEAD.size))
            coded = np.empty(coded_bytes, dtype=np.uint8)
            await self._receive_spans(sock, coded, np.array([[0, coded_bytes]]), coded_bytes)
            decode = partial(decoder.write, size, coded)
            await self._threads.move(decode, CancelFlag(), CODING_COSTS * size)
            sending.num_bytes += HEAD.size + coded_bytes
            sending.arrived += size

    async def _receive_spans(
        self, sock: socket.socket, region: NDArray[np.uint8], spans: Spans, end: int
    ) -> None:
        """Receive `end` bytes into spans [n, 2] (offset, nbytes)."""
        cancel = CancelFlag()
        position = 0
        while True:  # what is there already, before anything is waited for
            job = partial(receive_spans, sock, region, spans, position, cancel, slice_s(end))
            position = await self._threads.move(job, cancel, end)
            if position == end:
                return
            await wait_readable(sock)

    def _take_back(self, connection: _Connection) -> None:
        if not self._is_closed and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
