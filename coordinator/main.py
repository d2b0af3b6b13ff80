"""`pdserve coordinator`: HTTP for clients, gRPC for nodes, one process without torch."""

from __future__ import annotations

import asyncio
import logging
import os
from secrets import token_hex

import uvloop

from coordinator.admission import Admission, WaitingLine
from coordinator.api import ApiConfig, HttpServer, create_app
from coordinator.api.admin import add_admin_routes
from coordinator.api.config import parse_origins
from coordinator.api.context import CONTEXT
from coordinator.embedding_model import EmbeddingModel, embedding_model
from coordinator.flow import Flow
from coordinator.measure import MetricsObserver
from coordinator.pool_loads import PoolLoads
from coordinator.rebalancer import Rebalancer
from coordinator.registry import Registry
from coordinator.role_changes import RoleChanges, rebalance
from coordinator.routing import Router
from coordinator.running import RunningRequest
from coordinator.service import CoordinatorService
from coordinator.tenants import Tenants
from coordinator.tenants.opening import open_tenants
from coordinator.text import Tokenizer
from coordinator.text.parts import ToolFormat
from pdserve.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.clock import SystemClock
from pdserve.collector import freeze_loaded_objects
from pdserve.config import CoordinatorConfig
from pdserve.demo_model import CHECKPOINT_PATH, DEMO_MODEL_NAME
from pdserve.errors import ConfigError
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Welcome
from pdserve.signals import StopSignals
from pdserve.slo import ServiceClasses, parse_slo_classes
from pdserve.wire import coordinator_pb2_grpc
from pdserve.wire.channel import Server

log = logging.getLogger(__name__)


def run(config: CoordinatorConfig) -> None:
    """Run the coordinator until SIGTERM or SIGINT, then let requests in flight finish.

    Raises:
        PdserveError: the coordinator cannot start; says why.
    """
    if config.routing.rebalance and config.mode == "colocated":
        raise ConfigError("--rebalance needs two pools: leave it out with --mode colocated")
    classes = parse_slo_classes(config.routing.slo_classes, config.routing.default_class)
    checkpoint = resolve_checkpoint(
        config.checkpoint.model or str(CHECKPOINT_PATH),
        config.checkpoint.revision,
        with_weights=False,
    )
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path)
    embedders = embedding_model(checkpoint, config.answers.pooling)
    name = config.checkpoint.served_model_name or (
        checkpoint.model_id if config.checkpoint.model else DEMO_MODEL_NAME
    )
    tenants = open_tenants(
        config.access, config.host, classes.by_name, name, os.environ, SystemClock()
    )
    try:
        uvloop.run(_serve(config, checkpoint, tokenizer, embedders, classes, tenants, name))
    finally:
        tenants.close()


async def _serve(
    config: CoordinatorConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    embedders: EmbeddingModel,
    classes: ServiceClasses,
    tenants: Tenants,
    name: str,
) -> None:
    signals = StopSignals()
    timeouts = config.timeouts
    metrics = CoordinatorMetrics()
    registry = Registry()
    admission = Admission(
        WaitingLine[RunningRequest](config.routing.max_waiting),
        max_inflight=config.max_inflight,
        refuses=config.routing.admission,
        lowest_priority=classes.lowest.priority,
    )
    router = Router(registry, config.mode, config.routing.router)
    flow = Flow(
        registry,
        router,
        admission,
        metrics,
        model=name,
        request_s=timeouts.request_s,
    )
    app = create_app(
        flow,
        tokenizer,
        [name],
        config=_api_config(config),
        observer=MetricsObserver(metrics),
        metrics=metrics.exposition,
        classes=classes,
        tenants=tenants,
        embedding_model=embedders,
    )
    app[CONTEXT].grammars.begin()  # while nodes are still loading the model
    changes = RoleChanges(registry, config.mode, metrics)
    add_admin_routes(app, changes)
    loads = PoolLoads(
        registry, admission, lambda member: router.node_outlook(member).queue_s, SystemClock()
    )
    loads.watch(metrics)
    welcome = Welcome(coordinator_id=f"{config.host}:{config.grpc_port}", incarnation=token_hex(8))
    nodes = Server(timeouts.liveness_s)
    service = CoordinatorService(registry, flow, checkpoint.model_id, welcome, timeouts)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, nodes.grpc)
    http = HttpServer(app, host=config.host, port=config.port)
    grpc_port = await nodes.start(config.host, config.grpc_port)
    rebalancing: asyncio.Task[None] | None = None
    try:
        await http.start()
        await nodes.set_serving(True)
        if config.routing.rebalance:
            rebalancer = Rebalancer(SystemClock())
            rebalancing = asyncio.create_task(
                rebalance(lambda: rebalancer.tick(loads.look()), changes, timeouts.heartbeat_s)
            )
        freeze_loaded_objects()
        log.info("%s at %s, nodes attach to %s:%d", name, http.url, config.host, grpc_port)
        await signals.drain.wait()
        log.info("draining %d requests", flow.num_inflight)
        await _stop(http, signals, timeouts.drain_s)
    finally:
        if rebalancing is not None:
            rebalancing.cancel()
        await nodes.stop(grace_s=0.1)


def _api_config(config: CoordinatorConfig) -> ApiConfig:
    wanted = config.answers.tool_format
    return ApiConfig(
        tool_format=None if wanted == "auto" else ToolFormat(wanted),
        splits_reasoning=config.answers.split_reasoning,
        cors_origins=parse_origins(config.access.cors_origins),
    )


async def _stop(http: HttpServer, signals: StopSignals, drain_s: float) -> None:
    """Let requests in flight end, but not beyond `drain_s` or a second signal."""
    stopping = asyncio.create_task(http.stop(drain_s))
    hurry = asyncio.create_task(signals.now.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not stopping.done():
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
