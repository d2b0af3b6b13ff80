"""A node's life: listen, join, load, serve, drain.

    LOADING ──weights loaded──► READY ──SIGTERM──► DRAINING ──legs done, or drain_s over──► exit

A node joins its coordinators before its weights are loaded, so that they can show its progress; it
is given no legs until it says READY.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import uvloop

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.tier import FileBlocks
from kv_transfer.transports.catalog import choose_kinds
from pdserve.clock import SystemClock
from pdserve.config import NodeConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import ConfigError, RequestCancelled
from pdserve.metrics import NodeMetrics
from pdserve.node.gauges import (
    load_report,
    watch_prefix_exports,
    watch_role,
    watch_tier,
    watch_transfers,
)
from pdserve.node.headroom import Headroom, num_spoken_for
from pdserve.node.host_tier import make_tier, make_tier_blocks
from pdserve.node.kv_events import KvEventFeed
from pdserve.node.kv_memory import commit_if_asked, engine_buffer, make_kv_memory
from pdserve.node.link import CoordinatorLink
from pdserve.node.metrics_server import MetricsServer
from pdserve.node.model import NodeModel, load_runner, plan_model, use_cores
from pdserve.node.prefix_exports import PrefixExports
from pdserve.node.roles import NodeParts, Role
from pdserve.node.session_server import SessionServer
from pdserve.protocol import KvTier, LoadReport, NodeHello, NodeRole, NodeState
from pdserve.signals import StopSignals
from pdserve.wire import session_pb2_grpc
from pdserve.wire.channel import Server

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # how long the event loop may keep the engine's thread from Python

RoleFactory = Callable[[NodeParts], Role]


def run(config: NodeConfig, role: NodeRole, build: RoleFactory) -> None:
    """Run a node until it has drained.

    Raises:
        PdserveError: it cannot start; says why.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_cores(config.engine)
    model = plan_model(config)
    tier_blocks = make_tier_blocks(config, model)
    uvloop.run(_live(config, role, model, tier_blocks, build))


async def _live(
    config: NodeConfig,
    role: NodeRole,
    model: NodeModel,
    tier_blocks: FileBlocks | None,
    build: RoleFactory,
) -> None:
    signals = StopSignals()
    node = Node(config, role, model, tier_blocks, build)
    try:
        await node.listen()
        loading = asyncio.create_task(node.load())
        stopped = asyncio.create_task(signals.drain.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if signals.drain.is_set():
            node.abandon_loading()
            await asyncio.gather(loading, return_exceptions=True)
        else:
            await node.serve(await loading, signals)
    finally:
        await node.close()


class Node:
    """One prefill or decode node: a role, and everything around it."""

    def __init__(
        self,
        config: NodeConfig,
        role: NodeRole,
        model: NodeModel,
        tier_blocks: FileBlocks | None,
        build: RoleFactory,
    ) -> None:
        self._config = config
        self._model = model
        self._role_name = role
        self._state = NodeState.LOADING
        self._loading_progress = 0.0
        self._abandons_loading = False
        self._metrics = NodeMetrics()
        self._metrics_server = MetricsServer(self._metrics.exposition)
        self._server = Server(config.timeouts.liveness_s)
        self._memory = make_kv_memory(config, role, model)
        self._parts = parts = self._make_parts(tier_blocks)
        self._role = build(parts)
        self._links: list[CoordinatorLink] = []
        self._joining: list[asyncio.Task[None]] = []
        self._kv_events = KvEventFeed(self._links)
        if self._memory.kind != "private":  # else nobody could pull what is here
            parts.pool.observe(self._kv_events.follow(KvTier.POOL, lambda: parts.pool.hashes))
        if parts.tier is not None:
            tier = parts.tier.tier
            tier.observe(self._kv_events.follow(KvTier.HOST, lambda: tier.hashes))
            watch_tier(self._metrics, tier)
        headroom = Headroom(parts.pool, partial(num_spoken_for, self._role.engine.queues))
        self._prefixes = PrefixExports(
            parts.pool, parts.exporter, parts.tier, headroom, config.timeouts
        )
        watch_role(self._metrics, self._role)
        watch_prefix_exports(self._metrics, self._prefixes)
        watch_transfers(self._metrics, parts.exporter.statistics, parts.puller.statistics)

    async def listen(self) -> None:
        """Open every port and start joining the coordinators.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        config, parts, host = self._config, self._parts, self._config.host
        servicer = SessionServer(
            parts.exporter, self._role.announcer, config.timeouts.connect_s, self._prefixes
        )
        session_pb2_grpc.add_KvSessionServicer_to_server(servicer, self._server.grpc)
        if parts.tier is not None:
            parts.tier.start()
        try:
            await parts.exporter.start(host)
            metrics_port = await self._metrics_server.start(host, config.metrics_port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}: {error}") from error
        port = await self._server.start(host, config.port)
        hello = self._hello(f"{host}:{port}", f"{host}:{metrics_port}")
        log.info("%s listens on %s, metrics on %s", hello.node_id, port, metrics_port)
        for address in config.coordinators:
            link = CoordinatorLink(
                address,
                lambda: hello,
                self._load_report,
                self._role,
                config.timeouts,
                on_attached=self._kv_events.attached,
            )
            self._links.append(link)
            self._joining.append(asyncio.create_task(link.run()))

    async def load(self) -> ModelRunner:
        """Read the weights in a thread of its own.

        Raises:
            ModelError: they cannot be used.
        """
        await asyncio.to_thread(commit_if_asked, self._config, self._memory)
        return await asyncio.to_thread(
            load_runner, self._model, engine_buffer(self._memory), self._set_progress
        )

    def abandon_loading(self) -> None:
        """Make `load` raise at the next tensor."""
        self._abandons_loading = True

    async def serve(self, runner: ModelRunner, signals: StopSignals) -> None:
        """Take legs until SIGTERM, then finish those there are, within `drain_s`."""
        engine = asyncio.create_task(self._role.engine.run(runner, self._role))
        try:
            await self._enter(NodeState.READY)
            await _first_of(engine, signals.drain.wait())
            await self._enter(NodeState.DRAINING)
            try:
                async with asyncio.timeout(self._config.timeouts.drain_s):
                    await _first_of(engine, self._drained(), signals.now.wait())
            except TimeoutError:
                log.warning("%d legs were not done in time", len(self._role.legs))
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

    async def _drained(self) -> None:
        """No coordinator sends legs any more, and those there were are done."""
        for link in self._links:
            await link.wait_drain_seen()
        await self._role.legs.wait_empty()

    async def close(self) -> None:
        """Say goodbye, stop everything. Peers see their streams end."""
        await self._role.close()
        for link in self._links:
            await link.leave()
        await self._server.stop(grace_s=0.1)
        await self._metrics_server.close()
        _, pending = await asyncio.wait(self._joining, timeout=1.0) if self._joining else ((), ())
        for task in pending:
            task.cancel()
        await self._prefixes.close()
        if self._parts.tier is not None:
            await self._parts.tier.close()
        await self._parts.exporter.close()
        await self._parts.puller.close()
        self._memory.close()

    # ---- parts ---------------------------------------------------------------------------------

    def _make_parts(self, tier_blocks: FileBlocks | None) -> NodeParts:
        config, model, memory = self._config, self._model, self._memory
        node_id = config.node_id or f"{self._role_name.name.lower()}-{secrets.token_hex(3)}"
        incarnation = secrets.token_hex(8)
        clock = SystemClock()
        identity = KvIdentity(model.checkpoint.model_id, model.checkpoint.revision, model.layout)
        kinds = choose_kinds(config.transports, memory)
        pool = BlockPool(
            model.num_blocks,
            model.layout.block_size,
            prefix_cache=config.engine.prefix_cache,
            bump_generations=memory.bump,
        )
        return NodeParts(
            config=config,
            node_id=node_id,
            incarnation=incarnation,
            clock=clock,
            pool=pool,
            eos_token_ids=model.config.eos_token_ids,
            max_model_len=model.max_model_len,
            vocab_size=model.config.vocab_size,
            identity=identity,
            exporter=Exporter(
                node_id,
                incarnation,
                identity,
                memory,
                clock,
                kinds,
                with_checksums=config.checksums,
                ticket_lifetime_s=config.timeouts.ticket_s,
            ),
            puller=Puller(memory, identity, host_id(), kinds, name=f"{node_id}@{incarnation}"),
            metrics=self._metrics,
            state=lambda: self._state,
            tier=make_tier(tier_blocks, model.layout, memory, pool),
        )

    def _hello(self, session_address: str, metrics_address: str) -> NodeHello:
        return NodeHello(
            node_id=self._parts.node_id,
            incarnation=self._parts.incarnation,
            role=self._role_name,
            state=NodeState.LOADING,
            session_address=session_address,
            metrics_address=metrics_address,
            model_id=self._model.checkpoint.model_id,
            revision=self._model.checkpoint.revision,
            layout=self._model.layout,
            num_blocks=self._model.num_blocks,
            max_model_len=self._model.max_model_len,
            introduction_key=self._parts.exporter.introduction_key,
        )

    def _load_report(self) -> LoadReport:
        return load_report(self._role, self._role_name, self._state, self._loading_progress)

    def _set_progress(self, fraction: float) -> None:
        """From the loading thread, after each tensor; the next heartbeat reports it."""
        if self._abandons_loading:
            raise RequestCancelled("the node was stopped while it was loading")
        self._loading_progress = fraction

    async def _enter(self, state: NodeState) -> None:
        self._state = state
        log.info("%s is %s", self._parts.node_id, state.name.lower())
        await self._server.set_serving(state is NodeState.READY)
        for link in self._links:
            link.report_load()


async def _first_of(engine: asyncio.Task[None], *events: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of these; raises what ended the engine, if that was it."""
    waits = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait({engine, *waits}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if engine.done():
        engine.result()
