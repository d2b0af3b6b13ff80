"""A node's life: listen, join, load, profile, serve, drain.

    LOADING ──loaded, profiled──► READY ──SIGTERM──► DRAINING ──legs done, or drain_s over──► exit
                                    └──── engine dead, stuck or failing ────► SICK ──told──► exit

A node joins its coordinators before it loads the weights, so that they can show its progress. It is
given no legs until it reports READY. On standby, that is when a coordinator gives it a pool.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from msgspec.structs import replace

import pdserve
from kv_transfer.transports.catalog import IN_CLEAR
from pdserve.engine.interface import Runner, StepReport
from pdserve.engine.model_runner import ModelRunner
from pdserve.model_files.gguf.model import forget_files
from pdserve.node.assembly import ModelFacts, make_parts, use_loaded
from pdserve.node.coordinator_link import LEAVE_S, CoordinatorLink
from pdserve.node.coordinators import Coordinators
from pdserve.node.engine_watch import EngineWatch, unless_rank_lost
from pdserve.node.memory.kv_memory import begin_memory, make_kv_memory, prefill_refusal
from pdserve.node.places.place import begin_life
from pdserve.node.planned import Planned
from pdserve.node.prefixes.exports import PrefixExports
from pdserve.node.reports.gauges import (
    BusyShare,
    load_report,
    observe_step,
    watch_perf,
    watch_prefix_exports,
    watch_services,
    watch_sickness,
    watch_split_cores,
    watch_store,
    watch_tier,
)
from pdserve.node.reports.kv_events import KvEventFeed
from pdserve.node.reports.metrics_server import STANDBY, MetricsServer
from pdserve.node.reports.readers import readers_of
from pdserve.node.reports.step_costs import PerfFeed, ProfileWatch, SampleLog
from pdserve.node.roles import ServiceFactories
from pdserve.node.services import Services
from pdserve.node.sessions.server import SessionServer
from pdserve.node.split_cores.phases import Phases
from pdserve.node.standby import Standby
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.kind import kind_of
from pdserve.node.start.loading import Loading
from pdserve.node.start.other_ranks import start_other_ranks
from pdserve.protocol import KvTier, LoadReport, NodeHello, NodeRole, NodeState, Sickness
from pdserve.protocol.version import PROTOCOL
from pdserve.rules.cores import Slowdowns
from pdserve.rules.late import has_late_last
from pdserve.shared.addresses import format_address, is_loopback
from pdserve.shared.errors import ConfigError, NodeSick
from pdserve.shared.process.collector import freeze_loaded_objects
from pdserve.shared.process.exit_codes import SICK
from pdserve.shared.process.loop_watch import LoopWatch
from pdserve.shared.process.may_pass import config_error
from pdserve.shared.process.signals import StopSignals, end_process_after
from pdserve.wire import session_pb2_grpc
from pdserve.wire.certificate_end import CertificateEnd
from pdserve.wire.channel import Server
from pdserve.wire.security import Security

log = logging.getLogger(__name__)

SICK_END_S = 3.0  # for telling everybody that it is sick, after which a node ends in any case
MOST_REASON = 500  # characters


async def live(
    planned: Planned, cores: CorePlan, make: ServiceFactories, signals: StopSignals
) -> tuple[str, NodeRole]:
    """Live until drained; returns the model to go on with, if there is one, and the pool.

    Raises:
        ConfigError, ModelError, CapacityError: it cannot be served; or no coordinator lets it in.
    """
    node = Node(planned, cores, make, drain=signals.drain.set)
    try:
        await node.listen()
        loading = asyncio.create_task(node.load())
        stopped = asyncio.create_task(signals.drain.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if signals.drain.is_set():
            node.loading.abandon()
            await asyncio.gather(loading, return_exceptions=True)
        else:
            await node.serve(await loading, signals)
    finally:
        await node.close()
    if node.refusal:
        raise ConfigError(node.refusal)
    return node.becomes, node.role


class Node:
    """One node: its services, and everything that connects them to the cluster."""

    def __init__(
        self,
        planned: Planned,
        cores: CorePlan,
        make: ServiceFactories,
        *,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`drain` has `serve` end as a signal would: a coordinator has asked for that."""
        config, role, model = planned.node.config, planned.role, planned.model
        wakes = planned.was is not None
        self.becomes = ""  # the model to go on with when this one has drained; empty: none
        self.refusal = ""  # why no coordinator lets it in, if it can go back for that
        self._drain = drain
        self._config, self._planned = config, planned
        self._model = model
        self._cores = cores
        self._phases: Phases | None = None  # of a node that splits its cores, once it has loaded
        self._state = NodeState.LOADING
        self._sick_reason = ""
        self._security = Security.of(config.security)
        self._server = Server(config.timeouts.liveness_s, self._security)
        self._certificate = CertificateEnd(self._security.tls_dir)
        self._loop_lag_s: Callable[[], float] = float  # none is known while it loads
        self._memory = memory = make_kv_memory(role, model, gives_back=planned.place is not None)
        budget = None if planned.place is None else planned.place.memory_of(memory)
        self._ranks = ranks = start_other_ranks(config, model, cores, memory, self._security)
        self.loading = Loading(config, cores, model, memory, ranks.others, wakes=wakes)
        served, hosts = ModelFacts.of(model), ranks.kv_hosts
        self._parts = parts = make_parts(
            config, role, served, memory, planned.tier_blocks, lambda: self._state, hosts, budget
        )
        self._place = begin_life(planned.place, parts, budget, self.loading)
        self._services = services = Services(
            parts,
            make,
            role,
            prefill_refusal=prefill_refusal(config, memory),
            on_role=self._given_role,
            on_drain=self._asked_to_drain,
        )
        self._standby = Standby(parts.node_id, self._report_load)
        services.sessions.on_silent = self._report_load  # others are sent another way at once
        services.on_step(partial(observe_step, parts.metrics))
        services.on_step(self._correct_perf)
        self._busy = BusyShare(parts.perf, parts.clock.now())
        services.on_step(self._note_busy)
        kind = partial(kind_of, model, config.engine)
        samples = SampleLog(parts.node_id, kind, lambda: parts.perf.costs, parts.speculation.tally)
        services.on_step(samples.stepped)
        parts.pull_costs.on_pull(samples.pulled)
        self._links: list[CoordinatorLink] = []
        parts.adapters.on_change = self._tell_adapters
        reads = readers_of(self._links, config.timeouts, self._security, parts.clock)
        self._metrics_server = MetricsServer(
            parts.metrics.pieces, samples.since, self._probed_state, reads, self._security.tls_dir
        )
        self._coordinators: Coordinators | None = None  # not before this node listens
        self._kv_events = KvEventFeed(self._links)
        self._perf_feed = PerfFeed(self._links, parts.pull_costs, config.engine)
        if memory.kind != "private":  # otherwise no node could pull these blocks
            parts.pool.observe(self._kv_events.follow(KvTier.POOL, lambda: parts.pool.hashes))
        if parts.tier is not None:
            tier = parts.tier.tier
            tier.observe(self._kv_events.follow(KvTier.HOST, lambda: tier.hashes))
            watch_tier(parts.metrics, tier)
        if parts.store is not None:
            watch_store(parts.metrics, parts.store)
        self._prefixes = PrefixExports(
            parts.pool, parts.exporter, parts.tier, parts.headroom, config.timeouts
        )
        watch_services(parts.metrics, services)
        watch_sickness(parts.metrics, lambda: Sickness.of(self._sick_reason))
        watch_perf(parts.metrics, parts.perf)
        watch_prefix_exports(parts.metrics, self._prefixes)

    @property
    def role(self) -> NodeRole:
        """The pool that it works for."""
        return self._services.role

    async def listen(self) -> None:
        """Open every port and start joining the coordinators.

        Raises:
            ConfigError: an address cannot be listened on.
            NodeSick: a rank has not started.
        """
        await self._ranks.wait_mapped()
        config, parts, host = self._config, self._parts, self._config.host
        servicer = SessionServer(
            parts.exporter,
            self._services.announcer,
            parts.clock,
            config.timeouts.connect_s,
            self._prefixes,
        )
        session_pb2_grpc.add_KvSessionServicer_to_server(servicer, self._server.grpc)
        if parts.tier is not None:
            parts.tier.start()
        if parts.store is not None:
            parts.store.start()
        try:
            await parts.exporter.start(host, config.advertise, config.kv_port)
            metrics_port = await self._metrics_server.start(host, config.metrics_port)
        except OSError as error:
            what = f"cannot listen on {host}, at kv_port or metrics_port: {error}"
            raise config_error(what, error) from error
        reached = config.advertise or host
        port = await self._server.start(host, config.port)
        in_clear = IN_CLEAR & {reach.name for reach in parts.exporter.reaches}
        if config.security.tls_dir and in_clear and not is_loopback(reached):
            log.warning("KV over %s is not encrypted", ", ".join(sorted(in_clear)))
        hello = self._hello(format_address(reached, port), format_address(reached, metrics_port))
        log.info("%s listens on %s, metrics on %s", hello.node_id, port, metrics_port)
        self._coordinators = Coordinators(
            self._links, config.coordinators, lambda address: self._make_link(address, hello)
        )

    async def load(self) -> Runner:
        """Load the weights and profile steps, in the thread that will compute them.

        Raises:
            ModelError: the weights cannot be used.
            NodeSick: a rank has ended.
        """
        if self._place is None:
            await begin_memory(self._config, self._memory, self._parts.pool)
        else:
            await self._place.enter(self._model, self.loading.check_wanted)
        loading = self._services.engine.in_thread(self.loading.run)
        runner, known = await unless_rank_lost(loading, self._ranks.lost, self._end_sick)
        await unless_rank_lost(self._ranks.share_kv(self._parts), self._ranks.lost, self._end_sick)
        self._parts.perf.costs = known.costs
        use_loaded(self._parts, runner, self._model.checkpoint, self.loading.draft)
        if self.loading.slowdowns is not None:
            await self._split(runner, self.loading.slowdowns)
        self._memory.bump(range(self._memory.num_blocks))  # nobody's are what profiling wrote
        if self._place is not None:
            self._place.loaded()
        in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
        watch = ProfileWatch(self._parts.perf, lambda error: in_thread(partial(known.doubt, error)))
        self._services.on_step(lambda _: watch.stepped())
        self._perf_feed.tell()
        return runner

    async def _split(self, runner: ModelRunner, slowdowns: Slowdowns) -> None:
        parts = self._parts
        assert parts.prompt_engine is not None, "the config says so"
        self._phases = Phases(parts, parts.prompt_engine, self._cores, runner, slowdowns)
        await self._phases.load()
        watch_split_cores(parts.metrics, self._phases)

    async def serve(self, runner: Runner, signals: StopSignals) -> None:
        """Accept legs until SIGTERM, then finish those in progress, within `drain_s`."""
        forget_files()
        if not self._planned.node.others:
            freeze_loaded_objects()
        with LoopWatch() as watch:
            self._parts.metrics.watch_loop(watch)
            self._loop_lag_s = watch.longest_lag_s
            await self._serve(runner, signals)

    async def _serve(self, runner: Runner, signals: StopSignals) -> None:
        services, phases = self._services, self._phases
        running = services.engine.run(runner, services) if phases is None else phases.run(services)
        engine = asyncio.create_task(running)
        watch = self._engine_watch(engine)
        try:
            if self._config.standby:
                await self._standby.wait(watch, signals)
            if not signals.drain.is_set():
                await self._enter(NodeState.READY)
                await watch.until(signals.drain.wait())
            await self._enter(NodeState.DRAINING)
            try:
                async with asyncio.timeout(self._config.timeouts.drain_s):
                    await watch.until(self._drained(), signals.now.wait())
            except TimeoutError:
                log.warning("%d legs were not done in time", len(services.legs))
        except NodeSick as sick:
            await self._end_sick(sick)
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

    def _engine_watch(self, running: asyncio.Task[None]) -> EngineWatch:
        parts, compiles = self._parts, self._model.device.type != "cpu"
        return EngineWatch(
            [parts.engine] if parts.prompt_engine is None else [parts.engine, parts.prompt_engine],
            running,
            parts.perf,
            parts.clock,
            compiles=compiles,
            lost_rank=None if self._ranks.others is None else self._ranks.lost,
        )

    async def _end_sick(self, sick: NodeSick) -> NoReturn:
        """Tell everybody, and end the process.

        As after a crash, the kernel frees what it has. Nothing waits for the engine's thread, which
        may never return.
        """
        end_process_after(SICK_END_S, SICK)
        log.error("%s is sick: %s", self._parts.node_id, sick, exc_info=sick.__cause__)
        self._sick_reason = " ".join(sick.message.split())[:MOST_REASON]
        await self._enter(NodeState.SICK)
        if self._coordinators is not None:
            await self._coordinators.leave()
            await self._server.stop(grace_s=0.0)
            await self._coordinators.wait_left(LEAVE_S)
        sys.stderr.write(f"pdserve {self.role.name.lower()}: error: {self._sick_reason}\n")
        os._exit(SICK)

    async def _drained(self) -> None:
        """Wait until no coordinator can send further legs, and all legs have ended."""
        if self._coordinators is not None:
            await self._coordinators.wait_drain_seen()
        await self._services.legs.wait_empty()

    async def close(self) -> None:
        """Stop everything. Peers see their streams end."""
        await self._services.close()
        if self._coordinators is not None:
            await self._coordinators.leave()
        await self._server.stop(grace_s=0.1)
        await self._metrics_server.close()
        if self._coordinators is not None:
            await self._coordinators.wait_left(LEAVE_S)
        await self._prefixes.close()
        if self._parts.store is not None:
            await self._parts.store.close()
        if self._parts.tier is not None:
            await self._parts.tier.close()
        await self._parts.exporter.close()
        await self._parts.puller.close()
        await self._ranks.close()
        if self._phases is not None:
            self._phases.close()
        if self._place is not None:
            await self._place.end()
        self._memory.close()

    # ---- parts ---------------------------------------------------------------------------------

    def _hello(self, session_address: str, metrics_address: str) -> NodeHello:
        return NodeHello(
            node_id=self._parts.node_id,
            incarnation=self._parts.incarnation,
            role=self._services.role,
            state=NodeState.LOADING,
            session_address=session_address,
            metrics_address=metrics_address,
            model_id=self._model.checkpoint.model_id,
            revision=self._model.revision,
            layout=self._model.layout,
            num_blocks=self._parts.pool.num_blocks,
            max_model_len=self._model.max_model_len,
            short_len=self._model.config.short_len,
            introduction_key=self._parts.exporter.introduction_key,
            prefill_refusal=self._services.prefill_refusal,
            transports=self._parts.exporter.reaches,
            program_version=pdserve.__version__,
            protocol=PROTOCOL,
            late_last=has_late_last(self._config.policy.prefill_policy),
            weights=self._model.weights,
            model_name=self._planned.node.name,
            may_become=list(self._planned.node.others),
            place_of=self._config.place.place_of or self._config.place.ledger,
            has_woken=self._planned.was is not None,
            refused=self._planned.refused,
            arithmetic="" if self._model.precision is None else self._model.arithmetic,
        )

    def _asked_to_drain(self, become: str) -> None:
        if self._state is not NodeState.DRAINING:  # what it was asked first counts
            self.becomes = become
        self._drain()

    def _make_link(self, address: str, hello: NodeHello) -> CoordinatorLink:
        def say_hello() -> NodeHello:
            attached_to = [link.coordinator for link in self._links if link.is_attached]
            return replace(hello, role=self._services.role, attached_to=attached_to)

        return CoordinatorLink(
            address,
            say_hello,
            self._load_report,
            self._services,
            self._config.timeouts,
            on_attached=self._attached,
            on_refused=self._refused,
            security=self._security,
        )

    def _load_report(self) -> LoadReport:
        parts, progress = self._parts, self.loading.progress
        report = load_report(self._services, parts, self._state, progress, parts.clock.now())
        attached = [link.coordinator for link in self._links if link.is_attached]
        return replace(
            report,
            reason=self._sick_reason,
            num_coordinators=len(attached),
            leader=min(attached, default=""),
            sent_at=time.time(),
            loop_lag_s=self._loop_lag_s(),
            certificate_ends_at=self._certificate.seconds(),
            busy_share=self._busy.share(parts.clock.now()),
            prompt_share=self._busy.prompts,
            is_standby=self._standby.is_waiting,
            lacks_memory=self._place is not None and self._place.lacks_memory,
        )

    def _attached(self, link: CoordinatorLink) -> None:
        self._perf_feed.attached(link)
        self._kv_events.attached(link)
        link.send(self._parts.adapters.told())
        self._report_load()  # the others share the node with one more

    def _refused(self, link: CoordinatorLink) -> None:
        """What a node is asked to become may be nothing that its coordinators know by now."""
        if self._planned.can_go_back and all(link.refusal for link in self._links):
            self.refusal = link.refusal
            self._drain()

    def _note_busy(self, report: StepReport) -> None:
        share = 1.0 if self._phases is None else self._phases.last_steps(report).share
        self._busy.stepped(report, share)

    def _correct_perf(self, report: StepReport) -> None:
        # The whole period and not just the model's time: the prediction is for when the next token
        # arrives, and planning and messages are a large part of a small model's step.
        seconds = report.period_s if self._phases is None else self._phases.alone_s(report)
        if seconds is not None:
            self._parts.perf.observe(report.shape, seconds, self._parts.clock.now())
            self._parts.speculation.observe(report.shape, seconds)

    async def _enter(self, state: NodeState) -> None:
        self._state = state
        log.info("%s is %s", self._parts.node_id, state.name.lower())
        await self._server.set_serving(state is NodeState.READY)
        self._report_load()

    def _probed_state(self) -> str:
        return STANDBY if self._standby.is_waiting else self._state.name.lower()

    def _given_role(self) -> None:
        self._standby.role_given()
        self._report_load()

    def _tell_adapters(self) -> None:
        for link in self._links:
            link.send(self._parts.adapters.told())

    def _report_load(self) -> None:
        """Send a load report to all coordinators, without waiting for the next heartbeat."""
        for link in self._links:
            link.report_load()
