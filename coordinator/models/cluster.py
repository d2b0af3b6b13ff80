"""Who computes for a model: its nodes, its requests, and what decides about both.

Each model has a router, a registry, a flow and pools of its own, so nothing here asks which model a
request is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Final

from coordinator.adapters.life import Adapters, Serving
from coordinator.adapters.orders import AdapterOrders
from coordinator.admission import Admission, WaitingLine
from coordinator.admission.in_flight import InFlight
from coordinator.admission.measured_promises import MeasuredPromises
from coordinator.api.admin import Ordered
from coordinator.models.files import ModelFiles
from coordinator.models.wake_outlook import WakeOutlook
from coordinator.nodes.absent import Absent
from coordinator.nodes.registry import Member, Registry, Shares
from coordinator.nodes.revisions import Revisions
from coordinator.pools.pools import Pools
from coordinator.pools.wakes import AwakeNode, Coming, ModelNow, Waiting, needed_pools
from coordinator.requests.flow import Flow
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowProcess, FlowTimes, WantedNodes
from coordinator.routing import Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole
from pdserve.settings.config import CoordinatorConfig, Mode
from pdserve.settings.models import NumNodes
from pdserve.settings.values import parse_shares
from pdserve.shared.clock import Clock
from pdserve.shared.slo import AUTO, ServiceClasses


class ModelCluster:
    """The nodes of one model, and the requests that run on them."""

    def __init__(
        self,
        config: CoordinatorConfig,
        files: ModelFiles,
        classes: ServiceClasses,
        metrics: CoordinatorMetrics,
        clock: Clock,
        incarnation: str,
        *,
        in_flight: InFlight,
        ready: asyncio.Event,
        share_quotas: Callable[[int], None],
        process: FlowProcess,
        is_taken: Callable[[str], bool],
        coming: Callable[[], Coming | None],
        adapters: Mapping[str, str],
    ) -> None:
        """
        Args:
            metrics: of what happens to requests for this model.
            incarnation: the coordinator's: one of several leads, and changes pools.
            in_flight: the requests that are on nodes, with those of other models.
            ready: to be set once a request could be served.
            share_quotas: is told how many coordinators share these nodes.
            process: the coordinator's.
            is_taken: whether a name means something else than an adapter of this model.
            coming: when a node wakes as this model, which may have none; None: nobody knows.
            adapters: name |-> path, of those that are loaded once there are nodes.
        """
        self.model_id: Final = files.model_id
        self.name: Final = files.name
        self.names: Final = files.names
        self.registered_name: Final = files.name if files.registered else ""
        self.metrics: Final = metrics
        least = files.registered.min if files.registered else NumNodes()
        self._least = {NodeRole.PREFILL: least.prefill, NodeRole.DECODE: least.decode}
        self._clock = clock
        self.registry: Final = Registry()
        self.absent: Final = Absent(self.registry)
        self._ready: Final = ready
        if config.routing.slo_classes == [AUTO]:
            MeasuredPromises(self.registry, classes)
        self._admission = admission = self._make_admission(config, classes, in_flight, share_quotas)
        self._line = admission.line
        self._lowest_priority = classes.lowest.priority
        self.arrivals: Final = admission.arrivals
        router = Router(self.registry, config.mode, config.routing.router)
        outlook = WakeOutlook(self.registry, router.can_route, self._line, coming)
        self.adapter_orders: Final = AdapterOrders(self.registry)
        serving = Serving(
            self.registry, partial(router.can_route, ""), lambda digest: self.flow.uses(digest)
        )
        self.adapters: Final = Adapters(serving, self.adapter_orders, clock, is_taken, adapters)
        self.revisions: Final = Revisions(
            self.registry,
            router.can_route,
            parse_shares(config.routing.revision_shares),
            config.mode,
        )
        self.flow: Final = self._make_flow(config, files, router, admission, outlook, process)
        self.pools: Final = Pools(
            config, self.registry, router, admission, metrics, incarnation, clock
        )
        self.adapters.watch(metrics)
        self.registry.on_changed(self._look_ready)

    def now(self) -> ModelNow:
        """Return what decides whether its nodes wake and sleep."""
        now_s, lowest, on_nodes = self._clock.now(), self._lowest_priority, self._admission.on_nodes
        waiting = [
            Waiting(slo.tenant, one.waited_s(now_s), one.within_s, slo.priority > lowest)
            for one in self._line
            for slo in (one.request.slo,)
        ] + [
            Waiting(one.tenant, now_s - one.since_s, one.wait_s, one.priority > lowest)
            for one in self.flow.resumes.stranded()
        ]
        num_urgent = sum(number for level, number in on_nodes.items() if level > lowest)
        is_urgent = num_urgent > 0 or any(one.is_urgent for one in waiting)
        ended_s = [at_s for level, at_s in self._admission.ended_s.items() if level > lowest]
        return ModelNow(
            name=self.name,
            least=self._least,
            nodes=[_as_seen(member) for member in self.registry],
            waiting=waiting,
            urgent_share=num_urgent / total if (total := on_nodes.total()) else 1.0,
            urgent_s=now_s if is_urgent else max(ended_s, default=-inf),
        )

    @property
    def ordered(self) -> Ordered:
        """What operators change."""
        return Ordered(self.pools.changes, self.pools.drains, self.revisions)

    def _make_flow(
        self,
        config: CoordinatorConfig,
        files: ModelFiles,
        router: Router,
        admission: Admission[RunningRequest],
        outlook: WakeOutlook,
        process: FlowProcess,
    ) -> Flow:
        wanted = WantedNodes(
            revision_of=self.revisions.choose,
            until_awake=outlook.of,
            wake_s=outlook.wake_s,
            are_awaited=config.routing.sleep_after_s > 0 or self._may_sleep(config.mode),
            comes_back=lambda role: config.restarts and self.absent.misses(role),
            adapter_missing=self.adapters.missing,
        )
        return Flow(
            self.registry,
            router,
            admission,
            self.metrics,
            model=files.name,
            clock=self._clock,
            max_model_len=files.max_model_len,
            times=FlowTimes(config.timeouts.request_s, config.timeouts.resume_s),
            wanted=wanted,
            process=process,
        )

    def _make_admission(
        self,
        config: CoordinatorConfig,
        classes: ServiceClasses,
        in_flight: InFlight,
        share_quotas: Callable[[int], None],
    ) -> Admission[RunningRequest]:
        line = WaitingLine[RunningRequest](config.routing.max_waiting)

        def share_line(number: int) -> None:
            line.max_waiting = max(1, config.routing.max_waiting // number)

        Shares(self.registry, (share_line, share_quotas))
        return Admission(
            line,
            in_flight=in_flight,
            refuses=config.routing.admission,
            lowest_priority=classes.lowest.priority,
        )

    def _may_sleep(self, mode: Mode) -> bool:
        """Whether a pool that it needs may have no node: then its requests wait for one."""
        return bool(self.registered_name) and not all(
            any(self._least[role] for role in pool) for pool in needed_pools(mode)
        )

    def _look_ready(self, _: Member) -> None:
        if self.flow.is_ready():
            self._ready.set()


def _as_seen(member: Member) -> AwakeNode:
    load, hello = member.load, member.hello
    return AwakeNode(
        node_id=member.node_id,
        incarnation=hello.incarnation,
        role=member.role,
        is_ready=member.is_ready,
        num_requests=load.running_requests + load.waiting_requests,
        may_become=frozenset(hello.may_become),
        place_of=hello.place_of,
        refused=hello.refused,
        lacks_memory=load.lacks_memory,
    )
