"""A coordinator's process: all of it but HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from coordinator.adapters.life import Adapters, Serving
from coordinator.adapters.orders import AdapterOrders
from coordinator.admission import Admission, WaitingLine
from coordinator.nodes.registry import Registry
from coordinator.nodes.revisions import Revisions
from coordinator.pools.role_changes import RoleChanges
from coordinator.requests.flow import Flow
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowTimes, WantedNodes
from coordinator.routing import Router
from coordinator.service import CoordinatorService
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Welcome
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.config import Mode
from pdserve.settings.timeouts import CoordinatorTimeouts
from pdserve.shared.clock import SystemClock
from pdserve.wire import coordinator_pb2_grpc
from tests.lives.grpc_seam import Server
from tests.lives.loop import Process, VirtualLoop
from tests.lives.network import Network

HOST, PORT = "coordinator", 1
ADDRESS = f"{HOST}:{PORT}"


class CoordinatorProcess(Process):
    """The coordinator."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        mode: Mode,
        timeouts: CoordinatorTimeouts,
        max_inflight: int,
        declared: Mapping[str, str],
    ) -> None:
        super().__init__(loop, HOST)
        self._network = network
        self.context.run(self._make, mode, timeouts, max_inflight, declared)

    def _make(
        self,
        mode: Mode,
        timeouts: CoordinatorTimeouts,
        max_inflight: int,
        declared: Mapping[str, str],
    ) -> None:
        self.registry = Registry()
        self.metrics = CoordinatorMetrics()
        self.admission = Admission(WaitingLine[RunningRequest](64), max_inflight=max_inflight)
        self.router = Router(self.registry, mode)
        self.adapter_orders = AdapterOrders(self.registry)
        self.adapters = Adapters(
            Serving(
                self.registry,
                partial(self.router.can_route, ""),
                lambda digest: self.flow.uses(digest),
            ),
            self.adapter_orders,
            SystemClock(),
            lambda name: False,
            declared=declared,
        )
        self.flow = Flow(
            self.registry,
            self.router,
            self.admission,
            self.metrics,
            model="m",
            times=FlowTimes(timeouts.request_s, timeouts.resume_s),
            wanted=WantedNodes(adapter_missing=self.adapters.missing),
        )
        self.changes = RoleChanges(self.registry, mode, self.metrics)
        self.registered_name = ""
        self.model_id, self.revisions = "m", Revisions(self.registry, self.router.can_route, {})
        welcome = Welcome(coordinator_id=ADDRESS, incarnation="1", protocol=PROTOCOL)
        service = CoordinatorService([self], welcome, timeouts)
        self._server = Server(self._network)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, self._server)

    def start(self) -> None:
        """Let nodes attach."""
        self.spawn(self._server.start(HOST, PORT))
        self.spawn(self._keep_adapters())

    async def _keep_adapters(self) -> None:
        async with self.adapters.running():
            await asyncio.Event().wait()

    def count(self, counter: str, labels: Sequence[str]) -> dict[str, int]:
        """The values of a counter, by label."""
        found = getattr(self.metrics, counter)
        return {name: int(found.labels(name).value) for name in labels}
