"""A coordinator's life: its parts are made, listen, serve, drain and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex

from aiohttp import web

import pdserve
from coordinator.adapters.table import AdapterTable
from coordinator.admission.arrival_file import ArrivalFile
from coordinator.api import ApiConfig, HttpServer, create_app
from coordinator.api.adapters import add_adapter_routes
from coordinator.api.admin import add_admin_routes
from coordinator.api.config import parse_origins
from coordinator.api.context import CONTEXT
from coordinator.api.observer import RequestSummary
from coordinator.api.server.server import OTHER_FILES
from coordinator.jobs.keys import RUNNER
from coordinator.jobs.routes import add_job_routes, open_jobs
from coordinator.models.files import ModelFiles
from coordinator.models.served import ServedModels
from coordinator.observers.costs import Costs
from coordinator.observers.endings import CallWatch, MetricsObserver
from coordinator.observers.recording import Recordings, add_record_route
from coordinator.page.history import History
from coordinator.page.live import Live
from coordinator.page.routes import add_page_routes
from coordinator.prefixes.index import PromptHashes
from coordinator.reading import ReadersService
from coordinator.requests.journey import Journey
from coordinator.requests.surroundings import FlowProcess
from coordinator.service import CoordinatorService
from coordinator.stateful.again import go_on
from coordinator.stateful.routes import add_stateful_routes
from coordinator.stateful.storage.opening import open_store, place_of_jobs
from coordinator.stateful.storage.store import STORE
from coordinator.status import kv_used
from coordinator.tenants import Readers, Tenants
from coordinator.ticks import ticking
from coordinator.tracing import make_tracing
from pdserve.metrics import CoordinatorMetrics, pieces_of_all
from pdserve.model_files.gguf.model import forget_files
from pdserve.protocol import Welcome
from pdserve.protocol.status import CoordinatorStatus, RoleName
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.addresses import format_address
from pdserve.shared.clock import SystemClock
from pdserve.shared.costs import Prices
from pdserve.shared.process.collector import freeze_loaded_objects
from pdserve.shared.process.loop_watch import LoopWatch
from pdserve.shared.process.open_files import raise_file_limit
from pdserve.shared.process.signals import StopSignals
from pdserve.shared.process.user_cache import state_file
from pdserve.shared.prometheus.exposition import Exposition
from pdserve.shared.slo import ServiceClasses
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
        all_files: Sequence[ModelFiles],
        classes: ServiceClasses,
        tenants: Tenants,
        readers: Readers,
    ) -> None:
        """`all_files`: of each model; the first one is meant where a call names none."""
        self._config = config
        self._name = ", ".join(files.name for files in all_files)
        self._incarnation = token_hex(8)
        self._metrics = CoordinatorMetrics()
        self._history = History()
        self._recordings = Recordings(self._name)
        self._calls = CallWatch()
        self._security = Security.of(config.security)
        self._certificate = CertificateEnd(self._security.tls_dir)
        self._loop_lag_s: Callable[[], float] = float  # none is known before it runs
        self._tracing = make_tracing(config.tracing, all_files[0].name, SystemClock())
        self._models = ServedModels(
            config,
            all_files,
            classes,
            self._metrics,
            SystemClock(),
            self._incarnation,
            share_quotas=tenants.share,
            process=FlowProcess(self._journey_ended, self._history.load_changed, self._describe),
        )
        self._live = Live(self._models.catalog.status, self._kv_used, self._history)
        self._costs = self._make_costs()
        self._readers = readers
        self._app = self._make_app(classes, tenants)

    async def run(self, signals: StopSignals) -> None:
        """Serve until a signal asks to stop, then let requests in flight finish.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        config = self._config
        check_exposure(config.security, config.nodes_host)
        beginning = asyncio.create_task(self._models.begin())  # while nodes are still loading
        watching = asyncio.create_task(self._watch_calls())
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
            go_on(self._app[CONTEXT], self._app[STORE], self._models.ready)
            forget_files()
            freeze_loaded_objects()
            with LoopWatch() as watch:
                self._metrics.watch_loop(watch)
                self._loop_lag_s = watch.longest_lag_s
                async with (
                    self._rebalancing(),
                    self._sizing(),
                    self._live.running(),
                    self._following_adapters(),
                    self._keeping_arrivals(),
                ):
                    attach_to = format_address(config.nodes_host, grpc_port)
                    log.info("%s at %s, nodes attach to %s", self._name, http.url, attach_to)
                    await signals.drain.wait()
                    log.info("draining %d requests", self._models.num_inflight)
                    await _stop(http, signals, config.timeouts.drain_s)
        finally:
            beginning.cancel()
            watching.cancel()
            await nodes.stop(grace_s=0.1)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _watch_calls(self) -> None:
        """Calls that were sent before there was a node say nothing of the cluster."""
        await self._models.ready.wait()
        self._calls.begin()

    # ---- parts ---------------------------------------------------------------------------------

    def _make_costs(self) -> Costs | None:
        if not self._config.routing.price:
            return None
        prices = Prices.of(self._config.routing.price)
        costs = Costs(prices, self._models, SystemClock())
        costs.watch(self._metrics)
        return costs

    def _describe(self) -> CoordinatorStatus:
        """Return what there is to tell of this process, beside its requests."""
        return CoordinatorStatus(
            incarnation=self._incarnation,
            program_version=pdserve.__version__,
            event_loop_lag_ms=self._loop_lag_s() * 1e3,
            has_tls=self._security.tls_dir is not None,
            certificate_ends_at=self._certificate.seconds(),
            revision_shares=self._models.clusters[0].revisions.shares,
            max_inflight=self._config.max_inflight,
            max_waiting=self._config.routing.max_waiting,
            recent_calls=self._calls.recent(),
            absent=self._models.absent(),
            desired_nodes=self._models.desired_nodes(),
            costs=None if self._costs is None else self._costs.now(),
            adapters=self._models.adapter_states(),
        )

    def _kv_used(self) -> dict[RoleName, float]:
        clusters = self._models.clusters
        return kv_used(member for cluster in clusters for member in cluster.registry)

    def _journey_ended(self, journey: Journey, prompt: PromptHashes) -> None:
        self._history.journey_ended(journey)
        for recording in self._recordings.running:
            recording.tell(journey, prompt)
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
        config, models = self._config, self._models
        app = create_app(
            models.catalog,
            config=_api_config(config),
            observer=MetricsObserver(self._metrics, self._on_call_ended(), models.metrics),
            metrics=Exposition(partial(pieces_of_all, self._metrics, models.metrics)).text,
            classes=classes,
            tenants=tenants,
            readers=self._readers,
            begin_span=self._tracing.begin if self._tracing else lambda headers: None,
        )
        kept = config.answers.store, models.catalog.default.name, config.port
        add_stateful_routes(app, open_store(*kept))
        self._database = open_jobs(place_of_jobs(*kept))
        add_job_routes(app, self._database)
        add_adapter_routes(app, models.adapters_of, models.adapters_with)
        add_admin_routes(
            app,
            lambda node_id: models.of_node(node_id).ordered,
            lambda name: models.of_name(name).ordered,
        )
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
        service = CoordinatorService(self._models.clusters, welcome, timeouts)
        nodes = Server(
            timeouts.liveness_s,
            self._security,
            lambda address, reason: service.refused(f"a process at {address}", reason),
        )
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, nodes.grpc)
        reading = ReadersService(self._readers)
        coordinator_pb2_grpc.add_ReadersServicer_to_server(reading, nodes.grpc)
        return nodes

    @asynccontextmanager
    async def _rebalancing(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for cluster in self._models.clusters:
                await stack.enter_async_context(cluster.pools.rebalancing())
            yield

    @asynccontextmanager
    async def _following_adapters(self) -> AsyncIterator[None]:
        """Serve the adapters that are written down, and let go of what is unneeded."""
        async with AsyncExitStack() as stack:
            for cluster in self._models.clusters:
                await cluster.adapters.follow(AdapterTable(self._database, cluster.model_id))
                await stack.enter_async_context(cluster.adapters.running())
            yield

    @asynccontextmanager
    async def _keeping_arrivals(self) -> AsyncIterator[None]:
        """Know the daily pattern of former processes, and have the next one know this one's."""
        async with AsyncExitStack() as stack:
            for cluster in self._models.clusters:
                path = state_file("arrivals", cluster.name, self._config.port)
                if path is not None:
                    file = ArrivalFile(path.with_suffix(".json"), cluster.arrivals)
                    file.load(SystemClock().now())
                    await stack.enter_async_context(file.kept())
            yield

    def _sizing(self) -> AbstractAsyncContextManager[None]:
        """Keep desired numbers of nodes, and costs, up to date meanwhile."""

        def look() -> None:
            runner, clusters = self._app[RUNNER], self._models.clusters
            for cluster in clusters:
                num_requests = cluster.flow.num_inflight
                if self._config.routing.grow_for_batches:
                    cluster.pools.look(num_requests + runner.has_batches)
                else:  # of several models nobody knows which one lines are for
                    num_lines = runner.places.num_running if len(clusters) == 1 else 0
                    cluster.pools.look(num_requests, num_lines)
            self._models.look()
            if self._costs is not None:
                self._costs.tick()

        return ticking(self._config.timeouts.heartbeat_s, "sizing", look)


def _api_config(config: CoordinatorConfig) -> ApiConfig:
    return ApiConfig(
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
