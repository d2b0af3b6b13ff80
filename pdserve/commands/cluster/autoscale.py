"""Starts and drains nodes, as the coordinator says that load asks for.

A node of the other pool is the cheapest new node, and the coordinator moves it by itself
(`coordinator/pools/rebalancer.py`). Next comes one on standby, which has its weights and waits:
the coordinator has it begin (`coordinator/pools/standby.py`). So a node is started only if both
pools together lack one and none is on standby, and drained only if neither lacks any. When neither
lacks any, one is put on standby for the next time; while the cluster sleeps, none is.

A node that loads counts as one that works, so nobody waits for it before the next one is started.
One that should work by now does not count: others are started in its place, and it goes as soon as
no pool lacks any (`Starting`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from pdserve.commands.cluster.config import Scale
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.protocol.status import ClusterStatus, NodeStatus, RoleName
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import ClusterError

LOOK_S: Final = 1.0
LEAST_LATE_S: Final = 60.0  # for which a node is waited for in any case,
TIMES_LATE: Final = 5.0  # and so many times the longest start that was seen
KEPT: Final = 0.7  # of that, with each later start
MOST_TRIES: Final = 3  # processes that end before the node works
_WHY: Final = "load asks for it"
_WHY_SPARE: Final = "is not needed any more: it drains"
_WHY_LATE: Final = "should work by now, and does not: it is ended"
_WHY_STANDBY: Final = "it will wait on standby until load asks for it"


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """One change of the cluster."""

    what: Literal["start", "start on standby", "retire"]
    name: str


@dataclass(slots=True)
class _Away:
    since_s: float
    pids: set[int] = field(default_factory=set)
    is_late: bool = False


class Starting:
    """Which nodes should work by now, and do not: they hang, or their processes end."""

    def __init__(self, clock: Clock, most_s: float) -> None:
        """`most_s`: for which a node is waited for at most."""
        self._clock = clock
        self._most_s = most_s
        self._longest_s: float | None = None  # start of a process
        self._pids: dict[str, int] = {}  # of those that work, or did
        self._away: dict[str, _Away] = {}
        self.failed: set[str] = set()  # that have been late, and have not worked since

    @property
    def late(self) -> list[str]:
        """Those that should work by now, in the order in which they should have begun to."""
        return [name for name, away in self._away.items() if away.is_late]

    @property
    def hopeless(self) -> list[str]:
        """Those of them that nobody waits for any more."""
        now_s = self._clock.now()
        return [n for n, away in self._away.items() if now_s - away.since_s > self._most_s]

    def look(self, status: ClusterStatus, pids: Mapping[str, int]) -> None:
        """Look at the nodes that have been started, by their processes' ids."""
        now_s = self._clock.now()
        self._away = {name: away for name, away in self._away.items() if name in pids}
        for name, pid in pids.items():
            node = status.node(name)
            if _is_up(node) or _leaves(node):
                self.failed.discard(name)
                away = self._away.pop(name, None)
                if away is not None and pid != self._pids.get(name):
                    self._longest_s = max(KEPT * (self._longest_s or 0.0), now_s - away.since_s)
                self._pids[name] = pid
                continue
            away = self._away.setdefault(name, _Away(now_s))
            away.pids.add(pid)
            away_s = now_s - away.since_s
            if not away.is_late and (len(away.pids) > MOST_TRIES or away_s > self._patience_s):
                away.is_late = True
                self.failed.add(name)
                self._longest_s = max(self._longest_s or 0.0, away_s)  # starts may take so long now

    @property
    def _patience_s(self) -> float:
        if self._longest_s is None:
            return self._most_s
        return min(max(LEAST_LATE_S, TIMES_LATE * self._longest_s), self._most_s)


def next_steps(
    status: ClusterStatus,
    started: Sequence[str],
    spare: Sequence[str],
    scale: Scale,
    unplaced: Sequence[str] = (),
    to_stand_by: Collection[str] = (),
    starting: Starting | None = None,
) -> list[ScaleStep]:
    """Return what to do now, if anything: start all that lacks, or one change.

    Args:
        status: of the cluster.
        started: nodes that run, or are to run.
        spare: nodes that could be started, in the order in which to do so.
        scale: least and most nodes of each pool. One that nodes have moved to may have more, as
            long as load asks for them.
        unplaced: those of the started ones that no machine has room for yet; one may wait so.
        to_stand_by: those of the started ones that are to wait once they have loaded.
        starting: which should work by now; None: none.
    """
    if starting is not None and starting.hopeless:
        return [ScaleStep("retire", name) for name in starting.hopeless]
    late = [] if starting is None else starting.late
    failed = set() if starting is None else starting.failed
    nodes = {name: status.node(name) for name in started if name not in unplaced}
    serving = [node for node in nodes.values() if node is not None and node.state == "ready"]
    standby = [node for node in nodes.values() if node is not None and node.is_standby]
    away = [name for name, node in nodes.items() if not _is_up(node) and name not in late]
    coming = [name for name in away if not _leaves(nodes[name])]
    at_work = [name for name in coming if name not in to_stand_by]
    have: Mapping[RoleName, int] = Counter(
        [node.role for node in serving] + [_pool_of(name, nodes[name]) for name in at_work]
    )
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
        spare = sorted(spare, key=failed.__contains__)
        first = [name for pool in short for name in _first(spare, pool, lacking[pool])]
        number = sum(lacking.values()) - (len(coming) - len(at_work))  # those begin, too
        if number > 0 and not first:  # all of these pools' own nodes run: some in the other pool
            return [ScaleStep("start on standby", name) for name in spare[:1]]
        return [ScaleStep("start", name) for name in first[: max(0, number)]]
    if lacking and not short:
        if away:  # what the last change does has to be seen first
            return []
        if needless := [*late, *unplaced[1:]]:
            return [ScaleStep("retire", name) for name in needless]
        spare = [name for name in spare if name not in failed]
        return _less(lacking, serving, [*(n.node_id for n in standby), *unplaced], spare)
    return []


def _is_up(node: NodeStatus | None) -> bool:
    return node is not None and (node.state == "ready" or node.is_standby)


def _leaves(node: NodeStatus | None) -> bool:
    return node is not None and node.state in ("draining", "sick")


def _pool_of(name: str, node: NodeStatus | None) -> RoleName:
    """Return the pool that a node will work for, as far as it is known before it has joined."""
    if node is not None:
        return node.role
    return "prefill" if name.startswith("prefill") else "decode"


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
        self,
        cluster: Cluster,
        scale: Scale,
        say: Callable[[str], None],
        look_s: float = LOOK_S,
    ) -> None:
        """`say` is called with a sentence about each change."""
        self._cluster = cluster
        self._scale = scale
        self._say = say
        self._look_s = look_s
        self._starting = Starting(SystemClock(), cluster.config.start_s)

    async def run(self) -> NoReturn:
        """Look every `look_s`, since load changes with time; until cancelled."""
        making: dict[str, tuple[ScaleStep, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._look_s)
                making = {name: made for name, made in making.items() if not made[1].done()}
                try:
                    status = await self._cluster.status()
                except ClusterError:  # it is being started again
                    continue
                leaving = {step.name for step, _ in making.values() if step.what == "retire"}
                for step in self._steps(status, leaving):
                    if step.name not in making:
                        making[step.name] = step, group.create_task(self._make(step))

    def _steps(self, status: ClusterStatus, leaving: Collection[str]) -> list[ScaleStep]:
        """Return what to do now; while nodes are `leaving`, others are only started for pools."""
        cluster = self._cluster
        started, unplaced = cluster.started_nodes, cluster.unplaced_nodes
        placed = [name for name in started if name not in unplaced]
        self._starting.look(status, {name: cluster.pid(name) for name in placed})
        steps = next_steps(
            status,
            started,
            [name for name in cluster.node_names if name not in {*started, *leaving}],
            self._scale,
            unplaced,
            [name for name in started if cluster.begins_on_standby(name)],
            self._starting,
        )
        return [step for step in steps if step.what == "start" or not leaving]

    async def _make(self, step: ScaleStep) -> None:
        if step.what == "retire":
            is_late = step.name in self._starting.failed
            why = _WHY_LATE if is_late else _WHY_SPARE
            self._say(f"{step.name} {why}")
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
