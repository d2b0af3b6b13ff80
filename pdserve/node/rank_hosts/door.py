"""Who comes to a later host: a node that begins, or the one that is served, once more.

A node that comes while another one is served is told so, unless that one is just ending. Whoever
connects and says nothing delays nobody.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kv_transfer.hosts.conversation import receive_framed
from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.sockets import receive_exactly
from kv_transfer.transports.tls import NodeTls
from pdserve.node.rank_hosts.messages import SECRET_BYTES, HostOrder, failure
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.protocol.version import check_protocol
from pdserve.shared.errors import ConfigError, PdserveError

log = logging.getLogger(__name__)

FIRST_S: Final = 10.0  # from a connection to what it says first
# For a node that has ended to be noticed, after 5 s of silence at the latest, and its ranks to end.
FREE_S: Final = 10.0
# Connections that are not let in yet, and have not shown the join token; for a further one the
# oldest is closed.
MOST: Final = 64
_MOST_BYTES: Final = 1 << 20  # of an order
_ORDER: Final = msgspec.msgpack.Decoder(HostOrder)


@dataclass(frozen=True, slots=True, eq=False)
class ServedNode:
    """A node that has been let in."""

    order: HostOrder
    stream: HostStream
    peer: str  # its address
    # Its connection for KV, if it has devices, and for adapters, if it has none.
    second: Future[socket.socket] = field(default_factory=Future)


class Door:
    """It has a thread with an event loop of its own."""

    def __init__(self, listener: socket.socket, token: str, tls: NodeTls | None) -> None:
        """Accept connections from now on.

        Args:
            listener: which belongs to this.
            token: join token that nodes show; empty: none is in use.
            tls: how connections are secured.
        """
        self._token = token
        self._tls = tls
        self._coming: dict[asyncio.Task[None], None] = {}  # ordered: oldest first
        self._known: set[asyncio.Task[None]] = set()  # have shown the token, and wait for FREE_S
        self._wanted: asyncio.Queue[Future[ServedNode]] = asyncio.Queue()
        self._served: ServedNode | None = None
        self._loop = asyncio.new_event_loop()
        self._keeping: asyncio.Task[None] = self._loop.create_task(self._keep(listener))
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def next_node(self) -> ServedNode:
        """Wait for a node. The one before is not served any more."""
        if self._served is not None and not self._served.second.cancel():
            self._served.second.result().close()
        wanted: Future[ServedNode] = Future()
        self._loop.call_soon_threadsafe(self._wanted.put_nowait, wanted)
        return wanted.result()

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._keeping.cancel)
        self._thread.join()
        self._loop.close()

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._keeping)

    async def _keep(self, listener: socket.socket) -> None:
        acceptor = Acceptor(listener, self._come)
        try:
            await asyncio.get_running_loop().create_future()  # until `close`
        finally:
            await acceptor.close()
            tasks = [*self._coming, *self._known]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _come(self, sock: socket.socket) -> None:
        if len(self._coming) == MOST:
            oldest = next(iter(self._coming))
            del self._coming[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._meet(sock))
        self._coming[task] = None
        task.add_done_callback(lambda _: self._coming.pop(task, None))
        task.add_done_callback(self._known.discard)

    async def _meet(self, sock: socket.socket) -> None:
        """Let it in, or close it."""
        peer, is_in = "somebody", False
        try:
            peer = str(sock.getpeername()[0])
            async with asyncio.timeout(FIRST_S):
                if self._tls is not None:
                    sock = await self._tls.accept(sock)
                first = await receive_exactly(sock, SECRET_BYTES)  # an order is longer
                is_in = self._is_second(sock, first)
                if is_in:
                    return
                order = await receive_framed(sock, _ORDER, _MOST_BYTES, first)
            await self._let_in(order, HostStream(sock), peer)
            is_in = True
        except (PdserveError, OSError) as error:  # a TimeoutError, too
            log.warning("refused %s: %s", peer, str(error) or "it says nothing")
        finally:
            if not is_in:
                sock.close()

    def _is_second(self, sock: socket.socket, shown: bytes) -> bool:
        """Whether this is the second connection of the node that is served, which then has it."""
        node = self._served
        if node is None or len(shown) < SECRET_BYTES:
            return False
        if not hmac.compare_digest(shown, node.order.shown) or node.second.done():
            return False
        if not node.second.set_running_or_notify_cancel():
            return False  # it has just ended
        node.second.set_result(sock)
        return True

    async def _let_in(self, order: HostOrder, stream: HostStream, peer: str) -> None:
        """Hand this node over as the next one.

        Raises:
            ConfigError: it is refused, and has been told why.
            PeerLost: its connection broke.
        """
        try:
            wanted = await self._free(order)
        except ConfigError as error:
            stream.send(failure(order, str(error)))
            raise
        self._served = ServedNode(order, stream, peer)
        wanted.set_result(self._served)

    async def _free(self, order: HostOrder) -> Future[ServedNode]:
        """Wait until no node is served; returns what waits for the next. Raises ConfigError."""
        if not hmac.compare_digest(order.token.encode(), self._token.encode()):
            raise ConfigError(
                "the join token is not the one here: compare security.join_token_file"
            )
        check_protocol(order.protocol, "the node")
        if self._token and (task := asyncio.current_task()) in self._coming:
            del self._coming[task]  # strangers cannot push it out any more
            self._known.add(task)
        try:
            async with asyncio.timeout(FREE_S):
                return await self._wanted.get()
        except TimeoutError as error:
            raise ConfigError(
                "this host serves a node already: name it in engine.rank_hosts of one node only"
            ) from error
