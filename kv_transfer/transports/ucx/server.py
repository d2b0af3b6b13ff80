"""UCX, the exporter's end: registers the pool with an agent, and polls it while pullers connect.

An agent has to be polled until a puller's agent is connected to it (RDMA exchanges queue pairs;
over shared memory nothing is exchanged). Reads need no polling. So a puller that connects opens a
control connection (TCP), and the agent is polled until the puller reports that it is connected, a
few seconds at most. Otherwise nothing runs here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from kv_transfer.transports.acceptor import Connections
from kv_transfer.transports.frames import receive_access
from kv_transfer.transports.interface import Source
from kv_transfer.transports.sockets import receive_exactly, resolve, send_all, wait_readable
from kv_transfer.transports.ucx.agent import NixlAgent, UcxRegion, pid_namespace, rdma_devices
from kv_transfer.transports.ucx.offer import CONNECTED, UcxOffer, blocks_of
from pdserve.protocol import TransportOffer
from pdserve.shared.addresses import format_address
from pdserve.shared.errors import AccessDenied, PeerLost

T = TypeVar("T")

log = logging.getLogger(__name__)

_POLL_S = 0.001
_CONNECT_S = 5.0  # deadline for a puller to connect
_LAST_POLL_S = 0.1  # to wait for the end of polling; another puller may connect meanwhile
_MAX_PULLERS = 256


class UcxServer:
    """Owns the agent and its thread, the listener, and the control connections."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._agent: NixlAgent | None = None
        self._thread = ThreadPoolExecutor(1, "kv-ucx-export")  # the agent's
        self._connections: Connections | None = None
        self._num_connecting = 0
        self._polling: asyncio.Task[None] | None = None

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Register the pool, and listen for control connections on a port of `host`; 0: any."""
        offer = await self._on_thread(self._register)
        family, address = await resolve(host, port)
        listener = socket.create_server(address, family=family, backlog=_MAX_PULLERS)
        self._connections = Connections(
            listener, self._serve, _MAX_PULLERS, self._source.statistics
        )
        port = listener.getsockname()[1]
        return TransportOffer(
            name="ucx",
            endpoint=format_address(advertised_host, port),
            metadata=msgspec.msgpack.encode(offer),
        )

    async def close(self) -> None:
        """Disconnect all pullers and destroy the agent. A running read on this host may finish."""
        if self._connections is not None:
            await self._connections.close()
        if self._polling is not None:
            await asyncio.wait({self._polling})
        await self._on_thread(self._destroy)
        self._thread.shutdown()

    async def _serve(self, sock: socket.socket) -> None:
        statistics = self._source.statistics
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._source.tls is not None:
                    sock = await self._source.tls.accept(sock)
                self._source.check_access(await receive_access(sock))
                await self._poll_until_connected(sock)
        except AccessDenied as error:  # counted by check_access
            log.warning("a connection for UCX was closed: %s", error)
        except (PeerLost, OSError) as error:  # TimeoutError is an OSError
            statistics.garbage += 1
            log.warning(
                "a connection for UCX was closed: %s", str(error) or "not connected in time"
            )
        else:
            statistics.pools_shared += 1
            await wait_readable(sock)  # until the puller disconnects: nothing else is sent
        finally:
            sock.close()

    async def _poll_until_connected(self, sock: socket.socket) -> None:
        self._num_connecting += 1
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        try:
            if await receive_exactly(sock, len(CONNECTED)) != CONNECTED:
                raise PeerLost("the puller gave up")
        finally:
            self._num_connecting -= 1
        if self._num_connecting == 0 and self._polling is not None:
            # So that the puller's next read tests whether it works without polling.
            await asyncio.wait({self._polling}, timeout=_LAST_POLL_S)
        await send_all(sock, CONNECTED)

    async def _poll(self) -> None:
        """Poll while any puller connects.

        NIXL passes on neither UCX's event descriptor nor any other means to wait.
        """
        agent = self._agent
        try:
            while agent is not None and self._num_connecting:
                await self._on_thread(agent.progress)
                await asyncio.sleep(_POLL_S)
        except Exception:
            # Pullers that are connecting will time out; the next one starts polling again.
            log.exception("UCX cannot be polled")
        finally:
            self._polling = None

    def _register(self) -> UcxOffer:
        pool = self._source.pool
        blocks, generations = blocks_of(pool), UcxRegion.of(pool.generations)
        # A new name, since a puller's agent would mistake a second agent of one name for the first.
        name = f"{self._source.name}/{secrets.token_hex(4)}"
        agent = NixlAgent(name)
        agent.register(blocks)
        agent.register(generations)
        self._agent = agent
        return UcxOffer(
            name,
            agent.metadata,
            blocks.address,
            blocks.device,
            generations.address,
            pid_namespace(),
            bool(rdma_devices()),
        )

    def _destroy(self) -> None:
        if self._agent is not None:
            self._agent.destroy()
            self._agent = None

    async def _on_thread(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)
