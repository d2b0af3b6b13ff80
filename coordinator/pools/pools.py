"""The two pools of a cluster: what decides about them, wired and asked regularly."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

from coordinator.nodes.registry import Registry
from coordinator.pools.desired import POOLS, DesiredNodes
from coordinator.pools.drains import Drains
from coordinator.pools.loads import PoolLoads, Promises
from coordinator.pools.rebalancer import Rebalancer
from coordinator.pools.role_changes import RoleChanges, carry_out
from coordinator.pools.standby import StandbyNodes
from coordinator.routing import Router
from coordinator.status import ROLES
from coordinator.ticks import ticking
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol.status import RoleName
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import Clock


class Pools:
    """Orders given to nodes by operators are `changes` and `drains`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        router: Router,
        promises: Promises,
        metrics: CoordinatorMetrics,
        incarnation: str,
        clock: Clock,
    ) -> None:
        """`incarnation` is this coordinator's: one of several leads, and changes pools."""
        self._config = config
        self._registry = registry
        self._incarnation = incarnation
        self._clock = clock
        self._loads = PoolLoads(registry, promises, router.node_outlook, clock)
        self._loads.watch(metrics)
        self._desired = DesiredNodes(clock, config.routing.sleep_after_s)
        metrics.watch_each(
            "desired_nodes",
            "Nodes that the pool should have, for autoscalers",
            "pool",
            lambda: {str(pool): float(number) for pool, number in self.desired_nodes().items()},
        )
        self.drains = Drains(registry, config.mode)
        self.changes = RoleChanges(registry, config.mode, metrics)
        self._standby = StandbyNodes(
            registry,
            self.changes,
            lambda: self._desired.numbers,
            self._leads,
            flips=config.routing.rebalance,
        )

    def desired_nodes(self) -> dict[RoleName, int]:
        """How many nodes each pool should have."""
        return {ROLES[role]: number for role, number in self._desired.numbers.items()}

    def look(self, num_requests: int, num_lines: int = 0) -> None:
        """Bring the desired numbers up to date; `num_requests` are in flight.

        `num_lines` of them are lines of batches, for which no nodes are started: they take what
        others leave, so a pool is as busy as their share of the requests says.
        """
        demands = self._loads.demands(POOLS[self._config.mode])
        num_others = max(0, num_requests - num_lines)
        if num_lines:
            share = num_others / max(num_requests, 1)
            demands = {role: demand.of_share(share) for role, demand in demands.items()}
        self._desired.tick(demands, num_others)
        self._standby.look()

    def rebalancing(self) -> AbstractAsyncContextManager[None]:
        """Move nodes between the pools meanwhile, if the configuration says so."""
        if not self._config.routing.rebalance:
            return nullcontext()
        rebalancer = Rebalancer(self._clock)

        def look() -> None:
            turn = rebalancer.tick(self._loads.look())
            if turn is not None and self._leads():
                carry_out(turn, self.changes, self._desired)

        return ticking(self._config.timeouts.heartbeat_s, "rebalancing", look)

    def _leads(self) -> bool:
        return self._registry.are_led_by(self._incarnation)
