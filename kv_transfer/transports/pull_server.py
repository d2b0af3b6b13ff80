"""The exporter's end of a two-sided transport: a TCP server that verifies and serves tickets.

The protocol is in frames.py. The bytes are sent by a `Payload` per connection: this module decides
when they may be sent, not how. The event loop accepts connections, reads requests and waits for
slow pullers. So an idle, hanging or malicious connection costs one descriptor for a bounded time,
and never a thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.codec import RAW, Codec
from kv_transfer.memory import check_generations
from kv_transfer.spans.box import BlockRun, KvBox
from kv_transfer.spans.layer_pieces import part_of
from kv_transfer.spans.plan import Spans, is_quick, source_ranges
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports import tls
from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.block_answers import BlockAnswers
from kv_transfer.transports.block_read import BlockPlanner
from kv_transfer.transports.frames import (
    MAX_REQUEST_BYTES,
    CodedPullRequest,
    GarbledFrame,
    PullVerdict,
    frame_bytes,
    receive_access,
    receive_frame,
)
from kv_transfer.transports.interface import Source
from kv_transfer.transports.sockets import corked, resolve, send_all, send_now, wait_readable
from pdserve.protocol import TransportOffer
from pdserve.shared.addresses import format_address
from pdserve.shared.errors import (
    AccessDenied,
    LayoutMismatch,
    PeerLost,
    StaleIncarnation,
    StaleTicket,
    TicketInvalid,
    TransferError,
)

log = logging.getLogger(__name__)

NO_CODECS: Final[Mapping[str, Codec]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Deadlines and the number of connections."""

    request_s: float = 5.0  # for the access token, and for a request once it has begun
    idle_s: float = 300.0  # between the requests of a connection
    stall_s: float = 10.0  # for a puller that reads no bytes
    max_connections: int = 256


@dataclass(frozen=True, slots=True)
class VerifiedPull:
    """A request that has been verified."""

    ranges: Spans  # [n, 2] (offset, nbytes)
    block_ids: NDArray[np.int64]
    generations: NDArray[np.uint64]
    num_bytes: int
    codec: Codec | None  # None: they are sent as they are


class Payload(Protocol):
    """Sends the bytes of pulls to the puller of one connection."""

    @property
    def is_between_verdicts(self) -> bool:
        """Whether the bytes take the connection itself, so verdicts can wait for them."""
        ...

    async def send(self, pull: VerifiedPull) -> None:
        """Send all bytes of the pull, in the order of its ranges.

        Raises:
            PeerLost, OSError: the puller is gone or stalls, or sending failed; the connection ends.
        """
        ...

    async def close(self) -> None:
        """The connection has ended, and its socket is closed."""
        ...


OpenPayload = Callable[[socket.socket], Awaitable[Payload]]  # raises PeerLost, OSError


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    task: asyncio.Task[None] | None = None
    access: bytes = b""  # the access token, once it is verified
    answers: BlockAnswers | None = None  # to requests for few blocks, of a transport that has them
    is_pulling: bool = False
    num_bytes: int = 0  # that were sent, or should have been

    @property
    def is_busy(self) -> bool:
        """Whether a pull is being answered."""
        return self.is_pulling or (self.answers is not None and self.answers.is_busy)


class PullServer:
    """Serves one exporter's pool. Owns its listener, the connections and their payloads."""

    def __init__(
        self,
        name: str,
        source: Source,
        open_payload: OpenPayload,
        limits: PullLimits,
        threads: CopyThreads,
        codecs: Mapping[str, Codec] = NO_CODECS,
        planner: BlockPlanner | None = None,
    ) -> None:
        """Args:
        name: the name of the transport.
        source: the exporter.
        open_payload: called for each connection that has been admitted.
        limits: for connections.
        threads: for what would take too long on the event loop; the caller closes them.
        codecs: that the payloads have, by name.
        planner: of few blocks, which are sent over connections without TLS as they are.
        """
        self._planner = None if source.tls is not None else planner
        self._codecs = codecs
        self._name = name
        self._source = source
        self._open_payload = open_payload
        self._limits = limits
        self._threads = threads
        self._acceptor: Acceptor | None = None
        self._connections: dict[_Connection, None] = {}  # ordered: oldest first

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Listen on a port of `host`; 0: on any free one."""
        family, address = await resolve(host, port)
        listener = socket.create_server(
            address, family=family, backlog=self._limits.max_connections
        )
        self._acceptor = Acceptor(listener, self._admit)
        port = listener.getsockname()[1]
        endpoint = format_address(advertised_host, port)
        return TransportOffer(name=self._name, endpoint=endpoint, codecs=list(self._codecs))

    async def close(self) -> None:
        """End all connections, even in the middle of a pull."""
        if self._acceptor is not None:
            await self._acceptor.close()
        tasks = [c.task for c in self._connections if c.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _admit(self, sock: socket.socket) -> None:
        """Start serving a connection; at the limit, an idle one is closed for it."""
        if len(self._connections) >= self._limits.max_connections:
            self._source.statistics.turned_away += 1
            victim = self._least_needed()
            if victim is None or victim.task is None:
                sock.close()
                return
            self._forget(victim)
            victim.task.cancel()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._connections[connection] = None
        connection.task = asyncio.get_running_loop().create_task(self._serve(connection))
        # Not in the task itself: if it is cancelled before it starts, it never runs.
        connection.task.add_done_callback(lambda _: self._end(connection))

    def _end(self, connection: _Connection) -> None:
        connection.sock.close()
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)

    def _least_needed(self) -> _Connection | None:
        """The oldest connection without a token, else the oldest idle one, else None.

        A puller whose idle connection was closed opens a new one.
        """
        idle = [c for c in self._connections if not c.is_busy]
        return min(idle, key=lambda c: bool(c.access), default=None)

    async def _serve(self, connection: _Connection) -> None:
        try:
            if not await self._is_admitted(connection):
                return
            payload = await self._open_payload(connection.sock)
            if self._planner is not None:
                connection.answers = BlockAnswers(
                    connection.sock,
                    connection.access,
                    self._source,
                    self._planner,
                    self._limits.stall_s,
                )
            try:
                while request := await self._next_request(connection):
                    connection.is_pulling = True
                    with corked(connection.sock) if payload.is_between_verdicts else nullcontext():
                        goes_on = await self._answer(connection, payload, request)
                    if not goes_on:
                        return
                    if self._source.tls is not None and connection.num_bytes >= tls.MAX_BYTES:
                        return  # the puller opens another one
                    connection.is_pulling = False
            finally:
                connection.sock.close()
                await payload.close()
        except (PeerLost, OSError) as error:  # TimeoutError, a puller that stalls, is an OSError
            self._source.statistics.broken += 1
            log.info("a puller was lost: %s", error)

    async def _is_admitted(self, connection: _Connection) -> bool:
        """Whether the connection belongs to an open session; checked before anything else."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                if self._source.tls is not None:
                    connection.sock = await self._source.tls.accept(connection.sock)
                token = await receive_access(connection.sock)
            self._source.check_access(token)
        except AccessDenied as error:
            log.warning("a connection for KV was closed: %s", error)
        except (GarbledFrame, TimeoutError, ssl.SSLError) as error:
            self._source.statistics.garbage += 1
            log.warning("a connection for KV was closed: %s", str(error) or "no access token")
        except (PeerLost, OSError) as error:
            log.debug("a connection for KV ended: %s", error)
        else:
            connection.access = token
            return True
        return False

    async def _next_request(self, connection: _Connection) -> CodedPullRequest | None:
        """The next request; None if the puller has closed the connection or broke the protocol."""
        limits = self._limits
        try:
            if connection.answers is not None:
                await connection.answers.until_other(limits.idle_s)
            else:
                async with asyncio.timeout(limits.idle_s):
                    await wait_readable(connection.sock)
        except TimeoutError:
            return None
        try:
            async with asyncio.timeout(limits.request_s):
                return await receive_frame(connection.sock, CodedPullRequest, MAX_REQUEST_BYTES)
        except (GarbledFrame, TimeoutError) as error:
            self._source.statistics.garbage += 1
            log.warning("a connection for KV was closed: %s", str(error) or "half a request")
        except (PeerLost, OSError) as error:
            log.debug("a connection for KV ended: %s", error)
        return None

    async def _answer(
        self, connection: _Connection, payload: Payload, request: CodedPullRequest
    ) -> bool:
        """Serve one pull, from verdict to verdict; whether the connection may be used further.

        Raises:
            PeerLost, OSError: the puller is gone (or stalls: TimeoutError).
        """
        statistics = self._source.statistics
        try:
            self._source.check_access(connection.access)  # its session may have ended
            pull = await self._verify(request)
            connection.num_bytes += pull.num_bytes
            verdict = PullVerdict(num_bytes=pull.num_bytes)
            await self._say(connection.sock, verdict)
            await payload.send(pull)
            self._check(pull)
        except PeerLost:
            raise  # nothing more can be sent on this connection
        except StaleTicket as error:
            statistics.stale += 1
            await self._say(connection.sock, PullVerdict.of(error))
        except AccessDenied as error:  # counted by check_access
            await self._say(connection.sock, PullVerdict.of(error))
            return False
        except (TransferError, StaleIncarnation) as error:
            statistics.refused += 1
            await self._say(connection.sock, PullVerdict.of(error))
        else:
            statistics.pulls_served += 1
            await self._say(connection.sock, PullVerdict())
        return True

    async def _verify(self, request: CodedPullRequest) -> VerifiedPull:
        codec = self._codec(request.codec)
        ticket = self._source.open_ticket(request.ticket)
        layout, box = self._source.layout, request.box
        ticket.check_covers(box, layout)
        layout, which = part_of(layout, box)
        block_ids, generations = ticket.blocks_between(box.begin, box.end, layout.block_size, which)
        run = BlockRun(layout, block_ids, layout.full_blocks(box.begin))
        ranges = await self._plan(run, box)
        pull = VerifiedPull(ranges, block_ids, generations, int(ranges[:, 1].sum()), codec)
        self._check(pull)
        return pull

    def _codec(self, name: str) -> Codec | None:
        if name != RAW and name not in self._codecs:
            known = ", ".join(self._codecs) or "none"
            raise TransferError(f"there is no codec {name[:20]!r} here, but {known}")
        return self._codecs.get(name)

    async def _plan(self, run: BlockRun, box: KvBox) -> Spans:
        plan = partial(source_ranges, run, box)
        try:
            if is_quick(run.layout, run.layout, box):
                return plan()
            return await self._threads.run(plan, CancelFlag())
        except LayoutMismatch as error:
            raise TicketInvalid(f"the request is too large: {error}") from error

    def _check(self, pull: VerifiedPull) -> None:
        check_generations(self._source.pool.generations, pull.block_ids, pull.generations)

    async def _say(self, sock: socket.socket, verdict: PullVerdict) -> None:
        left = send_now(sock, frame_bytes(verdict))
        if left:
            async with asyncio.timeout(self._limits.stall_s):
                await send_all(sock, left)
