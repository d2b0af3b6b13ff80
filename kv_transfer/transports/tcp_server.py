"""TCP, the exporter's end: verifies a ticket, sends the blocks, says whether they stayed valid.

The event loop accepts, reads requests and waits for slow pullers; a thread is taken only to move
bytes of a verified pull, and given back whenever the puller is not ready. So connections that are
idle, hung or full of garbage cost a descriptor each, for a bounded time, and never a thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.generations import check_generations
from kv_transfer.plan import BlockRun, Spans, source_ranges
from kv_transfer.threads import CancelFlag, CopyThreads, slice_s
from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.frames import (
    MAX_REQUEST_BYTES,
    GarbledFrame,
    PullRequest,
    Verdict,
    receive_frame,
    send_frame,
)
from kv_transfer.transports.interface import Source
from kv_transfer.transports.sockets import resolve, wait_readable, wait_writable
from pdserve import _native
from pdserve.errors import PeerLost, StaleIncarnation, StaleTicket, TicketInvalid, TransferError
from pdserve.protocol import TransportOffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpLimits:
    """How long a connection may keep us waiting, and how many there may be."""

    request_s: float = 5.0  # from a request's first byte to its last; from accept to its first byte
    idle_s: float = 300.0  # between the requests of a connection that has shown a good ticket
    stall_s: float = 10.0  # the puller takes no byte
    max_connections: int = 256


@dataclass(frozen=True, slots=True)
class _Pull:
    """One verified request."""

    ranges: Spans  # [n, 2] (offset, nbytes)
    block_ids: NDArray[np.int64]
    generations: NDArray[np.uint64]
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    task: asyncio.Task[None] | None = None
    has_shown_ticket: bool = False
    is_pulling: bool = False


class TcpServer:
    """Serves one exporter's pool to any host. Owns its listener, connections and threads."""

    def __init__(
        self, source: Source, limits: TcpLimits | None = None, num_threads: int = 4
    ) -> None:
        self._source = source
        self._limits = limits or TcpLimits()
        self._threads = CopyThreads(num_threads, "kv-send")
        self._acceptor: Acceptor | None = None
        self._connections: dict[_Connection, None] = {}  # ordered: oldest first

    async def start(self, host: str, advertised_host: str) -> TransportOffer:
        """Listen on a free port of `host`."""
        family, address = await resolve(host, 0)
        listener = socket.create_server(
            address, family=family, backlog=self._limits.max_connections
        )
        self._acceptor = Acceptor(listener, self._admit)
        port = listener.getsockname()[1]
        return TransportOffer(name="tcp", endpoint=f"{advertised_host}:{port}")

    async def close(self) -> None:
        """End every connection, also one in the middle of a pull."""
        if self._acceptor is not None:
            await self._acceptor.close()
        tasks = [c.task for c in self._connections if c.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.close()

    def _admit(self, sock: socket.socket) -> None:
        """Start serving; when full, in the place of a connection that is idle."""
        if len(self._connections) >= self._limits.max_connections:
            self._source.statistics.turned_away += 1
            victim = self._least_needed()
            if victim is None or victim.task is None:
                sock.close()
                return
            del self._connections[victim]
            victim.task.cancel()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._connections[connection] = None
        connection.task = asyncio.get_running_loop().create_task(self._serve(connection))

    def _least_needed(self) -> _Connection | None:
        """The oldest that has shown no good ticket, else the oldest without a pull, else None.

        A puller whose idle connection is gone asks again on a new one.
        """
        idle = [c for c in self._connections if not c.is_pulling]
        return min(idle, key=lambda c: c.has_shown_ticket, default=None)

    async def _serve(self, connection: _Connection) -> None:
        try:
            while True:
                request = await self._next_request(connection)
                if request is None:
                    return
                connection.is_pulling = True
                await self._answer(connection, request)
                connection.is_pulling = False
        except (PeerLost, OSError) as error:  # TimeoutError, a puller that stalls, is an OSError
            self._source.statistics.broken += 1
            logger.info("a puller was lost: %s", error)
        finally:
            connection.sock.close()
            self._connections.pop(connection, None)

    async def _next_request(self, connection: _Connection) -> PullRequest | None:
        """None when the connection ends here: by the puller, or because it does not behave."""
        limits = self._limits
        try:
            async with asyncio.timeout(
                limits.idle_s if connection.has_shown_ticket else limits.request_s
            ):
                await wait_readable(connection.sock)
        except TimeoutError:
            return None
        try:
            async with asyncio.timeout(limits.request_s):
                return await receive_frame(connection.sock, PullRequest, MAX_REQUEST_BYTES)
        except (GarbledFrame, TimeoutError) as error:
            self._source.statistics.garbage += 1
            logger.warning("a connection for KV was closed: %s", error or "half a request")
        except (PeerLost, OSError) as error:
            logger.debug("a connection for KV ended: %s", error)
        return None

    async def _answer(self, connection: _Connection, request: PullRequest) -> None:
        """One pull, from verdict to verdict.

        Raises:
            OSError: the puller is gone (or stalls: TimeoutError).
        """
        statistics = self._source.statistics
        try:
            pull = self._verify(request)
            connection.has_shown_ticket = True
            await self._say(connection.sock, Verdict(num_bytes=pull.num_bytes))
            await self._send(connection.sock, pull)
            self._check(pull)
        except StaleTicket as error:
            statistics.stale += 1
            await self._say(connection.sock, Verdict.of(error))
        except (TransferError, StaleIncarnation) as error:
            statistics.refused += 1
            await self._say(connection.sock, Verdict.of(error))
        else:
            statistics.pulls_served += 1
            await self._say(connection.sock, Verdict())

    def _verify(self, request: PullRequest) -> _Pull:
        ticket = self._source.open_ticket(request.ticket)
        begin, end = request.begin, request.end
        if not ticket.first_token <= begin < end <= ticket.end_token:
            raise TicketInvalid(
                f"tokens {begin}..{end} are not in the ticket's "
                f"{ticket.first_token}..{ticket.end_token}"
            )
        layout = self._source.layout
        block_ids, generations = ticket.blocks_between(begin, end, layout.block_size)
        run = BlockRun(layout, block_ids, begin // layout.block_size)
        ranges = source_ranges(run, begin, end)
        pull = _Pull(ranges, block_ids, generations, int(ranges[:, 1].sum()))
        self._check(pull)
        return pull

    def _check(self, pull: _Pull) -> None:
        check_generations(self._source.pool.generations, pull.block_ids, pull.generations)

    async def _say(self, sock: socket.socket, verdict: Verdict) -> None:
        async with asyncio.timeout(self._limits.stall_s):
            await send_frame(sock, verdict)

    async def _send(self, sock: socket.socket, pull: _Pull) -> None:
        cancel = CancelFlag()
        position = 0
        while position < pull.num_bytes:
            job = partial(
                _native.send_spans,
                sock.fileno(),
                self._source.pool.flat,
                pull.ranges,
                position,
                cancel.byte,
                slice_s(pull.num_bytes),
            )
            before, position = position, await self._threads.move(job, cancel, pull.num_bytes)
            self._source.statistics.bytes_sent += position - before
            if position < pull.num_bytes:
                async with asyncio.timeout(self._limits.stall_s):
                    await wait_writable(sock)
