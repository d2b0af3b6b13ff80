"""The two processes of the transfer benchmark: one exports a pool, one pulls from it.

Each answers requests until the benchmark closes the connection. Both fill a pool with the same
content: the exporter's is pulled from; the puller's is the source of memcpy, and the reference that
pulls are compared with.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import uvloop

from kv_transfer.cuda.catalog import open_driver
from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.sharded_link import AnyLink
from kv_transfer.puller import Puller
from kv_transfer.sharded_pool import parts_of
from kv_transfer.transports.catalog import KINDS, TransportKind
from pdserve.commands.bench.transfer.pools import CPU, BenchPool, OpenDriver, filled_pool
from pdserve.commands.bench.transfer.wire import (
    AskCpu,
    BenchMessage,
    ConnectedTo,
    ConnectTo,
    Cpu,
    EndSocket,
    Issue,
    Issued,
    Measure,
    PoolsFilled,
    PullOrder,
    PullTimes,
    Request,
    Serve,
    Served,
    Verified,
    Verify,
)
from pdserve.engine.ranks.sizes import ONE_RANK, Parallelism
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import (
    ClusterError,
    ConfigError,
    CorruptTransfer,
    PeerLost,
    TransferError,
    TransferTimeout,
)

Role = Literal["exporter", "puller"]

BLOCK_TOKENS = 16
_CONNECT_S = 10.0
_TICKET_S = 3600.0  # longer than any measurement


def _layout(num_layers: int) -> KvLayout:
    return KvLayout.gqa(
        layers=num_layers, heads=8, head_dim=64, block_size=BLOCK_TOKENS, dtype=KvDtype.BFLOAT16
    )


LAYER_BYTES = _layout(1).block_bytes


def layout_of(block_bytes: int) -> KvLayout:
    """Return a layout with blocks of that size.

    Raises:
        ConfigError: the size is not a whole number of layers.
    """
    num_layers, rest = divmod(block_bytes, LAYER_BYTES)
    if rest or not num_layers:
        raise ConfigError(
            f"blocks of {block_bytes} bytes: must be a multiple of {LAYER_BYTES}, one layer"
        )
    return _layout(num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The pools of one process."""

    num_blocks: int
    block_bytes: int
    device: str = CPU  # of the first part
    parallelism: Parallelism = ONE_RANK  # of the node, whose ranks have a part each
    commit: bool  # whether they allocate all memory at once

    @property
    def identity(self) -> KvIdentity:
        """Of what is in them."""
        layout = layout_of(self.block_bytes)
        return KvIdentity("benchmark", "", layout, self.parallelism.pipeline)

    def filled(self, open_driver: OpenDriver) -> BenchPool:
        """Make one. Raises as filled_pool."""
        layout = layout_of(self.block_bytes)
        parts = layout.parts(self.parallelism.tensor, self.parallelism.pipeline)
        sizes = [part.block_bytes for part in parts]
        return filled_pool(self.num_blocks, sizes, self.device, open_driver)


def run_end(role: Role, sock: socket.socket, plan: PoolPlan) -> None:
    """Run one of the two processes, until the other end of `sock` is closed.

    Raises:
        PdserveError: a pull failed, or moved a wrong byte.
    """
    uvloop.run(_answer_all(role, sock, plan))


async def _answer_all(role: Role, sock: socket.socket, plan: PoolPlan) -> None:
    conversation = await EndSocket.over(sock)
    end = ExporterEnd(plan) if role == "exporter" else PullerEnd(plan)
    try:
        committed = [pool.commit() for pool in end.pools] if plan.commit else [False]
        await conversation.send(PoolsFilled(has_huge_pages=all(committed)))
        while True:
            try:
                request = await conversation.receive_request()
            except ClusterError:
                return  # the benchmark has ended or died
            await conversation.send(await end.answer(request))
    finally:
        await end.close()
        await conversation.close()


class ExporterEnd:
    """The exporter, by one transport at a time."""

    def __init__(
        self,
        plan: PoolPlan,
        kinds: Sequence[TransportKind] = KINDS,
        open_driver: OpenDriver = open_driver,
    ) -> None:
        self._identity = plan.identity
        self._kinds = kinds
        self._pool = plan.filled(open_driver)
        self.pools = [self._pool]
        self._exporter: Exporter | None = None

    async def answer(self, request: Request) -> BenchMessage:
        """Do what is asked for."""
        match request:
            case Serve():
                return await self._serve(request)
            case Issue():
                return self._issue(request)
            case AskCpu():
                return Cpu(time.process_time())
            case _:
                raise ClusterError(f"an exporter does not support {request}")

    async def close(self) -> None:
        """Stop serving, and release the pool."""
        if self._exporter is not None:
            await self._exporter.close()
        self._pool.close()

    async def _serve(self, request: Serve) -> Served:
        if self._exporter is not None:
            await self._exporter.close()
        exporter = self._exporter = Exporter(
            "exporter",
            f"by-{request.transport}",
            self._identity,
            self._pool.pool,
            SystemClock(),
            [_kind(request.transport, self._kinds)],
            tickets=TicketRules(_TICKET_S),
        )
        await exporter.start(request.host)
        for offer in exporter.offers:  # of each part
            if offer.unavailable:
                return Served(None, offer.unavailable)
        return Served(exporter.welcome())

    def _issue(self, request: Issue) -> Issued:
        if self._exporter is None:
            raise ClusterError("tickets were asked for before anything was served")
        issue = self._exporter.issue
        return Issued(
            [issue("benchmark", 0, len(ids) * BLOCK_TOKENS, ids) for ids in request.block_ids]
        )


class PullerEnd:
    """The puller, by one transport at a time."""

    def __init__(
        self,
        plan: PoolPlan,
        kinds: Sequence[TransportKind] = KINDS,
        open_driver: OpenDriver = open_driver,
    ) -> None:
        self._identity = plan.identity
        self._kinds = kinds
        self._expected, self._pool = self.pools = [plan.filled(open_driver) for _ in range(2)]
        self._puller: Puller | None = None
        self._link: AnyLink | None = None

    async def answer(self, request: Request) -> BenchMessage:
        """Do what is asked for."""
        match request:
            case ConnectTo():
                return await self._connect(request)
            case Verify():
                return await self._verify(request)
            case Measure():
                return await self._measure(request)
            case _:
                raise ClusterError(f"a puller does not support {request}")

    async def close(self) -> None:
        """Disconnect, and release the pools."""
        await self._disconnect()
        for pool in self.pools:
            pool.close()

    async def _disconnect(self) -> None:
        if self._link is not None:
            await self._link.close()
        if self._puller is not None:
            await self._puller.close()
        self._link = self._puller = None

    async def _connect(self, request: ConnectTo) -> ConnectedTo:
        await self._disconnect()
        kind = _kind(request.transport, self._kinds)
        obstacle = kind.obstacle(parts_of(self._pool.pool)[0])
        if obstacle is not None:
            return ConnectedTo(obstacle)
        self._puller = Puller(self._pool.pool, self._identity, host_id(), [kind])
        try:
            self._link = await self._puller.connect(request.welcome, _CONNECT_S)
        except (PeerLost, TransferTimeout) as error:
            return ConnectedTo(error.message)
        return ConnectedTo()

    async def _verify(self, request: Verify) -> Verified:
        order = request.order
        self._pool.clear(order.destination_ids)
        await self._pull(order, request.timeout_s)
        for source_id, destination_id in zip(order.source_ids, order.destination_ids, strict=True):
            if not np.array_equal(
                self._expected.block(source_id), self._pool.block(destination_id)
            ):
                raise CorruptTransfer(
                    f"block {source_id} of the exporter is not what arrived in {destination_id}"
                )
        return Verified()

    async def _measure(self, request: Measure) -> PullTimes:
        pull_s, pull_cpu_s, memcpy_s = [], [], []
        for index, order in enumerate(request.orders):
            # Alternate which goes first, so that neither finds the caches warmer. Memcpy writes to
            # the blocks of the pull before: stores past the caches are slow where the lines were
            # just written, which no node does to the blocks that it is about to pull into.
            elsewhere = request.orders[index - 1].destination_ids
            if index % 2:
                memcpy_s.append(self._memcpy(order.source_ids, elsewhere))
            started_s, cpu_s = time.perf_counter(), time.process_time()
            await self._pull(order, request.timeout_s)
            pull_s.append(time.perf_counter() - started_s)
            pull_cpu_s.append(time.process_time() - cpu_s)
            if not index % 2:
                memcpy_s.append(self._memcpy(order.source_ids, elsewhere))
        return PullTimes(pull_s, pull_cpu_s, memcpy_s)

    async def _pull(self, order: PullOrder, timeout_s: float) -> None:
        if self._puller is None or self._link is None:
            raise TransferError("a pull was asked for without a link")
        await self._puller.pull(self._link, order.ticket, order.destination_ids, 0, timeout_s)

    def _memcpy(self, source_ids: Sequence[int], destination_ids: Sequence[int]) -> float:
        return self._pool.copy_from(self._expected, source_ids, destination_ids)


def _kind(name: str, kinds: Sequence[TransportKind]) -> TransportKind:
    return next(kind for kind in kinds if kind.name == name)
