"""The two pools of a cluster: what decides about them, wired and asked regularly."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from coordinator.admission.arrivals import Arrivals
from coordinator.nodes.registry import Registry
from coordinator.pools.desired import POOLS, DesiredNodes
from coordinator.pools.drains import Drains
from coordinator.pools.loads import PoolLoads, Promises
from coordinator.pools.lookahead import LookAhead
from coordinator.pools.rebalancer import Rebalancer
from coordinator.pools.role_changes import RoleChanges, carry_out
from coordinator.pools.standby import StandbyNodes
from coordinator.pools.starts import Starts
from coordinator.routing import Router
from coordinator.status import ROLES
from coordinator.ticks import ticking
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole
from pdserve.protocol.status import RoleName
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import Clock
from pdserve.shared.costs import Prices


class Requested(Promises, Protocol):
    """What users ask for (`coordinator.admission`)."""

    @property
    def arrivals(self) -> Arrivals:
        """What comes, and will."""
        ...


class Pools:
    """Orders given to nodes by operators are `changes` and `drains`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        router: Router,
        promises: Requested,
        metrics: CoordinatorMetrics,
        incarnation: str,
        clock: Clock,
    ) -> None:
        """`incarnation` is this coordinator's: one of several leads, and changes pools."""
        self._config = config
        self._registry = registry
        self._incarnation = incarnation
        self._clock = clock
        self._began_s = clock.now()
        self._loads = PoolLoads(registry, promises, router.node_outlook, clock)
        self._loads.watch(metrics)
        self.changes = RoleChanges(registry, config.mode, metrics)
        starts = Starts(
            registry,
            self.changes,
            clock,
            lambda: self._desired.numbers,
            flips=config.routing.rebalance,
        )
        prices = Prices.of(config.routing.price)
        look_ahead = LookAhead(
            promises.arrivals,
            clock,
            starts.until_next_s,
            {NodeRole.PREFILL: prices.prefill, NodeRole.DECODE: prices.decode},
        )
        self._desired = DesiredNodes(clock, config.routing.sleep_after_s, look_ahead.at)
        metrics.count_each(
            "arrivals_forecast_off",
            "Requests in 10 s by which forecasts of a minute before were off: those in use, and "
            '"as in the last half minute"',
            "way",
            lambda: {str(way): off for way, off in promises.arrivals.num_off.items()},
        )
        metrics.watch_each(
            "desired_nodes",
            "Nodes that the pool should have, for autoscalers",
            "pool",
            lambda: {str(pool): float(number) for pool, number in self.desired_nodes().items()},
        )
        self.drains = Drains(self.changes)
        self._standby = StandbyNodes(
            registry,
            self.changes,
            lambda: self._desired.numbers,
            self._may_give,
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
            turn = rebalancer.tick(self._loads.look(), self._desired.numbers)
            if turn is not None and self._leads():
                carry_out(turn, self.changes, self._desired)

        return ticking(self._config.timeouts.heartbeat_s, "rebalancing", look)

    def _may_give(self) -> bool:
        """Whether nodes on standby may begin: not before others have had time to come back."""
        is_new = self._clock.now() - self._began_s < self._config.timeouts.liveness_s
        return self._leads() and not is_new

    def _leads(self) -> bool:
        return self._registry.are_led_by(self._incarnation)
