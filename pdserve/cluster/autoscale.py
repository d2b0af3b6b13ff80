"""Starts and drains nodes of one machine, as the coordinator says that load asks for.

A node of the other pool is the cheapest new node, and the coordinator moves it by itself
(`coordinator/pools/rebalancer.py`). So a node is started only if both pools together lack one, and
drained only if neither lacks any.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from pdserve.cluster.config import Scale
from pdserve.cluster.supervisor import Cluster
from pdserve.errors import ClusterError
from pdserve.process.exit_codes import StartFailed
from pdserve.protocol.status import ClusterStatus, RoleName

LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the cluster."""

    what: Literal["start", "retire"]
    name: str


def next_steps(
    status: ClusterStatus, started: Sequence[str], spare: Sequence[str], scale: Scale
) -> list[Step]:
    """Return what to do now, if anything: one change, but of each pool if there are no nodes.

    Args:
        status: of the cluster.
        started: nodes that run, or are to run.
        spare: nodes that could be started, in the order in which to do so.
        scale: least and most nodes of each pool.
    """
    nodes = [status.node(name) for name in started]
    if any(node is None or node.state != "ready" for node in nodes):
        return []  # what the last change does has to be seen first
    pools: Mapping[RoleName, int] = Counter(node.role for node in nodes if node is not None)
    missing: dict[RoleName, int] = {}
    for pool, number in status.coordinator.desired_nodes.items():
        missing[pool] = min(max(number, scale.least), scale.most) - pools.get(pool, 0)
    if sum(missing.values()) > 0:
        short = sorted((p for p in missing if missing[p] > 0), key=lambda pool: -missing[pool])
        firsts = [next((name for name in spare if name.startswith(pool)), None) for pool in short]
        steps = [Step("start", name) for name in firsts if name is not None]
        return steps[:1] if started else steps
    if missing and max(missing.values()) <= 0 and min(missing.values()) < 0:
        over = min(missing, key=lambda pool: missing[pool])
        mine = [node for node in nodes if node is not None and node.role == over]
        idlest = min(mine, key=lambda node: (node.running_requests, node.queued_tokens))
        return [Step("retire", idlest.node_id)]
    return []


class Autoscaler:
    """Follows the desired numbers of nodes of a ready cluster, while `run` does."""

    def __init__(self, cluster: Cluster, scale: Scale, say: Callable[[str], None]) -> None:
        """`say` is called with a sentence about each change."""
        self._cluster = cluster
        self._scale = scale
        self._say = say

    async def run(self) -> NoReturn:
        """Look every second, since load changes with time; until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                status = await self._cluster.status()
            except ClusterError:  # it is being started again
                continue
            started = self._cluster.started_nodes
            spare = [name for name in self._cluster.node_names if name not in started]
            steps = next_steps(status, started, spare, self._scale)
            await asyncio.gather(*(self._make(step) for step in steps))

    async def _make(self, step: Step) -> None:
        if step.what == "retire":
            self._say(f"{step.name} is not needed any more: it drains")
            self._say((await self._cluster.retire_node(step.name)).told)
            return
        self._say(f"starting {step.name}: load asks for it")
        try:
            await self._cluster.start_node(step.name)
        except StartFailed as error:  # whoever restarts processes has heard of it
            self._say(str(error))
        else:
            self._say(f"{step.name} is ready")
