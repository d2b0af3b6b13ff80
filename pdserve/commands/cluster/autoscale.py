"""Starts and drains nodes, as the coordinator says that load asks for.

A node of the other pool is the cheapest new node, and the coordinator moves it by itself
(`coordinator/pools/rebalancer.py`). Next comes one on standby, which has its weights and waits:
the coordinator has it begin (`coordinator/pools/standby.py`). So a node is started only if both
pools together lack one and none is on standby, and drained only if neither lacks any. When neither
lacks any, one is put on standby for the next time; while the cluster sleeps, none is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from pdserve.commands.cluster.config import Scale
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.protocol.status import ClusterStatus, NodeStatus, RoleName
from pdserve.shared.errors import ClusterError

LOOK_S: Final = 1.0
_WHY: Final = "load asks for it"
_WHY_STANDBY: Final = "it will wait on standby until load asks for it"


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """One change of the cluster."""

    what: Literal["start", "start on standby", "retire"]
    name: str


def next_steps(
    status: ClusterStatus,
    started: Sequence[str],
    spare: Sequence[str],
    scale: Scale,
    unplaced: Sequence[str] = (),
) -> list[ScaleStep]:
    """Return what to do now, if anything: start all that lacks, or one change.

    Args:
        status: of the cluster.
        started: nodes that run, or are to run.
        spare: nodes that could be started, in the order in which to do so.
        scale: least and most nodes of each pool. One that nodes have moved to may have more, as
            long as load asks for them.
        unplaced: those of the started ones that no machine has room for yet; one may wait so.
    """
    nodes = [status.node(name) for name in started]
    known = [node for node in nodes if node is not None]
    serving = [node for node in known if node.state == "ready"]
    standby = [node for node in known if node.is_standby]
    if len(serving) + len(standby) + len(unplaced) < len(started):
        return []  # what the last change does has to be seen first
    have: Mapping[RoleName, int] = Counter(node.role for node in serving)
    desired = status.coordinator.desired_nodes
    lacking = {
        pool: min(max(number, scale.least), max(scale.most, have[pool])) - have[pool]
        for pool, number in desired.items()
    }
    short = sorted((p for p in lacking if lacking[p] > 0), key=lambda pool: -lacking[pool])
    if sum(lacking.values()) > 0:
        if unplaced:
            return []  # they are asked for already
        if standby and any(_is_given_one(pool, desired, have) for pool in short):
            return []  # the coordinator has it begin
        first = [name for pool in short for name in _first(spare, pool, lacking[pool])]
        return [ScaleStep("start", name) for name in first[: sum(lacking.values())]]
    if lacking and not short:
        if len(unplaced) > 1:
            return [ScaleStep("retire", name) for name in unplaced[1:]]
        return _less(lacking, serving, [*(n.node_id for n in standby), *unplaced], spare)
    return []


def _is_given_one(
    pool: RoleName, desired: Mapping[RoleName, int], have: Mapping[RoleName, int]
) -> bool:
    """Return whether the coordinator has a node on standby begin in this pool, and no other move.

    It does not know of least and most numbers: by them both pools may lack a node that, by what is
    desired, one can spare.
    """
    all_lack = sum(number - have[other] for other, number in desired.items()) > 0
    return desired[pool] > have[pool] and (all_lack or not have[pool])


def _first(names: Sequence[str], pool: RoleName, number: int) -> list[str]:
    """Return the first of these nodes that are of a pool, as far as there are so many."""
    return [name for name in names if name.startswith(pool)][:number]


def _less(
    lacking: Mapping[RoleName, int],
    serving: Sequence[NodeStatus],
    standby: Sequence[str],
    spare: Sequence[str],
) -> list[ScaleStep]:
    """Return what to do where no pool lacks a node."""
    over = min(lacking, key=lambda pool: lacking[pool])
    if lacking[over] < 0:
        mine = [node for node in serving if node.role == over]
        idlest = min(mine, key=lambda node: (node.running_requests, node.queued_tokens))
        return [ScaleStep("retire", idlest.node_id)]
    if not serving:  # it sleeps
        return [ScaleStep("retire", name) for name in standby[:1]]
    return [] if standby else [ScaleStep("start on standby", name) for name in spare[:1]]


class Autoscaler:
    """Follows the desired numbers of nodes of a ready cluster, while `run` does."""

    def __init__(
        self, cluster: Cluster, scale: Scale, say: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        """`say` is called with a sentence about each change."""
        self._cluster = cluster
        self._scale = scale
        self._say = say
        self._look_s = look_s

    async def run(self) -> NoReturn:
        """Look every `look_s`, since load changes with time; until cancelled."""
        making: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._look_s)
                making = {name: task for name, task in making.items() if not task.done()}
                unplaced = self._cluster.unplaced_nodes
                if making.keys() - unplaced:
                    continue
                try:
                    status = await self._cluster.status()
                except ClusterError:  # it is being started again
                    continue
                started = self._cluster.started_nodes
                spare = [name for name in self._cluster.node_names if name not in started]
                for step in next_steps(status, started, spare, self._scale, unplaced):
                    making[step.name] = group.create_task(self._make(step))

    async def _make(self, step: ScaleStep) -> None:
        if step.what == "retire":
            self._say(f"{step.name} is not needed any more: it drains")
            self._say((await self._cluster.retire_node(step.name)).told)
            return
        on_standby = step.what == "start on standby"
        self._say(f"starting {step.name}: " + (_WHY_STANDBY if on_standby else _WHY))
        try:
            await self._cluster.start_node(step.name, on_standby=on_standby)
        except ClusterError as error:  # if it has ended, whoever restarts processes has heard of it
            self._say(str(error))
        except OSError as error:  # the system cannot have another process now
            self._say(f"{step.name} cannot be started: {error}; trying again")
        else:
            self._say(f"{step.name} is {'on standby' if on_standby else 'ready'}")
