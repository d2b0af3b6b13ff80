"""A coordinator's life: its parts are made, listen, serve, drain and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from secrets import token_hex

from aiohttp import web

import pdserve
from coordinator.admission import Admission, WaitingLine
from coordinator.admission.measured_promises import MeasuredPromises
from coordinator.api import ApiConfig, HttpServer, create_app
from coordinator.api.admin import add_admin_routes
from coordinator.api.config import parse_origins
from coordinator.api.context import CONTEXT
from coordinator.api.observer import RequestSummary
from coordinator.api.server.server import OTHER_FILES
from coordinator.nodes.absent import Absent
from coordinator.nodes.registry import Member, Registry
from coordinator.nodes.revisions import Revisions
from coordinator.nodes.shares import Shares
from coordinator.observers.call_metrics import MetricsObserver
from coordinator.observers.call_watch import CallWatch
from coordinator.observers.costs import Costs
from coordinator.observers.recording import Recordings, add_record_route
from coordinator.page.history import History
from coordinator.page.live import Live
from coordinator.page.routes import add_page_routes
from coordinator.pools.pools import Pools
from coordinator.prefixes.hashes import PromptHashes
from coordinator.requests.flow import Flow
from coordinator.requests.journey import Journey
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from coordinator.served_model import ServedModel
from coordinator.service import CoordinatorService
from coordinator.stateful.again import go_on
from coordinator.stateful.routes import add_stateful_routes
from coordinator.stateful.storage.opening import open_store
from coordinator.stateful.storage.store import STORE
from coordinator.tenants import Tenants
from coordinator.text.parts import ToolFormat
from coordinator.ticks import ticking
from coordinator.tracing.otlp import make_tracing
from pdserve.addresses import format_address
from pdserve.clock import SystemClock
from pdserve.costs import Prices
from pdserve.metrics import CoordinatorMetrics
from pdserve.process.collector import freeze_loaded_objects
from pdserve.process.loop_watch import LoopWatch
from pdserve.process.open_files import raise_file_limit
from pdserve.process.signals import StopSignals
from pdserve.prometheus.exposition import Exposition
from pdserve.protocol import Welcome
from pdserve.protocol.status import CoordinatorStatus
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.config import CoordinatorConfig
from pdserve.settings.values import parse_shares
from pdserve.slo import AUTO, ServiceClasses
from pdserve.wire import coordinator_pb2_grpc
from pdserve.wire.certificate_end import CertificateEnd
from pdserve.wire.channel import Server
from pdserve.wire.security import Security, check_exposure

log = logging.getLogger(__name__)


class Coordinator:
    """The parts of one coordinator. It is made and run in the same event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        model: ServedModel,
        classes: ServiceClasses,
        tenants: Tenants,
    ) -> None:
        self._config = config
        self._model = model
        self._registry = Registry()
        self._incarnation = token_hex(8)
        if config.routing.slo_classes == [AUTO]:
            MeasuredPromises(self._registry, classes)
        self._metrics = CoordinatorMetrics()
        self._history = History()
        self._recordings = Recordings(model.name)
        self._calls = CallWatch()
        self._absent = Absent(self._registry)
        self._security = Security.of(config.security)
        self._certificate = CertificateEnd(self._security.tls_dir)
        self._loop_lag_s: Callable[[], float] = float  # none is known before it runs
        line = WaitingLine[RunningRequest](config.routing.max_waiting)
        self._tracing = make_tracing(config.tracing, model.name, SystemClock())
        admission = Admission(
            line,
            max_inflight=config.max_inflight,
            refuses=config.routing.admission,
            lowest_priority=classes.lowest.priority,
        )

        def share_line(number: int) -> None:
            line.max_waiting = max(1, config.routing.max_waiting // number)

        Shares(self._registry, (share_line, tenants.share))
        router = Router(self._registry, config.mode, config.routing.router)
        self._revisions = Revisions(
            self._registry, router.can_route, parse_shares(config.routing.revision_shares)
        )
        self._flow = Flow(
            self._registry,
            router,
            admission,
            self._metrics,
            model=model.name,
            request_s=config.timeouts.request_s,
            resume_s=config.timeouts.resume_s,
            revision_of=self._revisions.choose,
            on_ended=self._journey_ended,
            on_load=self._history.load_changed,
            describe_process=self._describe,
            waits_for_nodes=config.routing.sleep_after_s > 0,
        )
        self._live = Live(self._flow.status, self._history)
        self._pools = Pools(
            config,
            self._registry,
            router,
            admission,
            self._metrics,
            self._incarnation,
            SystemClock(),
        )
        self._costs: Costs | None = None
        if config.routing.price:
            self._costs = Costs(Prices.of(config.routing.price), self._registry, SystemClock())
            self._costs.watch(self._metrics)
        self._ready = asyncio.Event()  # once a request could be served
        self._registry.on_changed(self._look_ready)
        self._app = self._make_app(classes, tenants)

    async def run(self, signals: StopSignals) -> None:
        """Serve until a signal asks to stop, then let requests in flight finish.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        config = self._config
        check_exposure(config.security, config.nodes_host)
        self._app[CONTEXT].grammars.begin()  # while nodes are still loading the model
        beginning = asyncio.create_task(self._model.tokenizer.begin())
        raise_file_limit(self._app[CONTEXT].config.max_connections + OTHER_FILES)
        https_dir = Path(config.access.https_dir) if config.access.https_dir else None
        http = HttpServer(self._app, host=config.host, port=config.port, https_dir=https_dir)
        nodes = self._make_node_server()
        grpc_port = await nodes.start(config.nodes_host, config.grpc_port)
        try:
            await http.start()
            if self._tracing is not None:
                self._tracing.listens_on(config.host, http.port)
            await nodes.set_serving(True)
            go_on(self._app[CONTEXT], self._app[STORE], self._ready)
            freeze_loaded_objects()
            with LoopWatch() as watch:
                self._metrics.watch_loop(watch)
                self._loop_lag_s = watch.longest_lag_s
                async with self._pools.rebalancing(), self._sizing(), self._live.running():
                    attach_to = format_address(config.nodes_host, grpc_port)
                    log.info("%s at %s, nodes attach to %s", self._model.name, http.url, attach_to)
                    await signals.drain.wait()
                    log.info("draining %d requests", self._flow.num_inflight)
                    await _stop(http, signals, config.timeouts.drain_s)
        finally:
            beginning.cancel()
            await nodes.stop(grace_s=0.1)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    # ---- parts ---------------------------------------------------------------------------------

    def _describe(self) -> CoordinatorStatus:
        """Return what there is to tell of this process, beside its requests."""
        return CoordinatorStatus(
            incarnation=self._incarnation,
            program_version=pdserve.__version__,
            event_loop_lag_ms=self._loop_lag_s() * 1e3,
            has_tls=self._security.tls_dir is not None,
            certificate_ends_at=self._certificate.seconds(),
            revision_shares=self._revisions.shares,
            max_inflight=self._config.max_inflight,
            max_waiting=self._config.routing.max_waiting,
            recent_calls=self._calls.recent(),
            absent=self._absent.nodes(),
            desired_nodes=self._pools.desired_nodes(),
            costs=None if self._costs is None else self._costs.now(),
        )

    def _journey_ended(self, journey: Journey, prompt: PromptHashes) -> None:
        self._history.journey_ended(journey)
        self._recordings.journey_ended(journey, prompt)
        if self._tracing is not None:
            self._tracing.journey_ended(journey)

    def _on_call_ended(self) -> list[Callable[[RequestSummary], None]]:
        listeners: list[Callable[[RequestSummary], None]] = [
            self._history.call_ended,
            self._calls.call_ended,
        ]
        if self._tracing is not None:
            listeners.append(self._tracing.call_ended)
        if self._costs is not None:
            listeners.append(self._costs.call_ended)
        return listeners

    def _make_app(self, classes: ServiceClasses, tenants: Tenants) -> web.Application:
        """Return the application that clients talk to."""
        app = create_app(
            self._flow,
            self._model.tokenizer,
            [self._model.name],
            config=_api_config(self._config),
            observer=MetricsObserver(self._metrics, self._on_call_ended()),
            metrics=Exposition(self._metrics.pieces).text,
            classes=classes,
            tenants=tenants,
            embedding_model=self._model.embedding,
            begin_span=self._tracing.begin if self._tracing else lambda headers: None,
        )
        config = self._config
        add_stateful_routes(app, open_store(config.answers.store, self._model.name, config.port))
        add_admin_routes(app, self._pools.changes, self._pools.drains, self._revisions)
        add_record_route(app, self._recordings)
        if config.access.page:
            add_page_routes(app, self._live)
        return app

    def _make_node_server(self) -> Server:
        """Return the server that nodes attach to."""
        config, timeouts = self._config, self._config.timeouts
        welcome = Welcome(
            coordinator_id=format_address(config.nodes_host, config.grpc_port),
            incarnation=self._incarnation,
            protocol=PROTOCOL,
        )
        service = CoordinatorService(
            self._registry, self._flow, self._revisions, self._model.model_id, welcome, timeouts
        )
        nodes = Server(
            timeouts.liveness_s,
            self._security,
            lambda address, reason: self._registry.refused(f"a process at {address}", reason),
        )
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, nodes.grpc)
        return nodes

    def _look_ready(self, _: Member) -> None:
        if self._flow.is_ready():
            self._ready.set()

    def _sizing(self) -> AbstractAsyncContextManager[None]:
        """Keep desired numbers of nodes, and costs, up to date meanwhile."""

        def look() -> None:
            self._pools.look(self._flow.num_inflight)
            if self._costs is not None:
                self._costs.tick()

        return ticking(self._config.timeouts.heartbeat_s, "sizing", look)


def _api_config(config: CoordinatorConfig) -> ApiConfig:
    wanted = config.answers.tool_format
    return ApiConfig(
        tool_format=None if wanted == "auto" else ToolFormat(wanted),
        splits_reasoning=config.answers.split_reasoning,
        cors_origins=parse_origins(config.access.cors_origins),
        idle_timeout_s=config.timeouts.idle_s,
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
