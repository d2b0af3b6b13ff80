"""Pools under load that changes: the real decisions, over nodes whose work is a fluid.

What decides is real: loads, rebalancer, desired numbers, standby, and the steps of `--autoscale`.
What it decides about is two queues. Prompts bring work for prefill nodes, in seconds; computed
prompts become streams, which decode nodes share evenly and which end after so many tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, pi, sin

from msgspec import structs

from coordinator.admission.arrivals import DAY_S, Arrivals
from coordinator.admission.decisions import Reason
from coordinator.nodes.registry import Member, Registry
from coordinator.pools.desired import POOLS, DesiredNodes, PoolDemand
from coordinator.pools.loads import PoolLoads
from coordinator.pools.lookahead import LookAhead
from coordinator.pools.rebalancer import Rebalancer
from coordinator.pools.role_changes import RoleChanges, carry_out
from coordinator.pools.standby import StandbyNodes
from coordinator.pools.starts import Starts
from coordinator.routing.router import NodeOutlook
from coordinator.status import ROLES
from pdserve.commands.cluster.autoscale import ScaleStep, Starting, next_steps
from pdserve.commands.cluster.config import Scale
from pdserve.commands.simulation.coordinator import HEARTBEAT_S
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import LoadReport, NodeRole, NodeState, PerfReport, SetRole, StepCosts
from pdserve.protocol.status import ClusterStatus, CoordinatorStatus
from pdserve.shared.clock import ManualClock
from tests.fakes.members import NUM_BLOCKS, join, said_to
from tests.fakes.statuses import node_status

P, D = NodeRole.PREFILL, NodeRole.DECODE
TTFT_S, TPOT_S = 2.0, 0.05
LOAD_S = 30.0  # from the start of a process until it has loaded
MOST_START_S = 900.0
OUTPUT_TOKENS = 60
FIRST_STEP_S, ROW_S = 0.010, 0.001  # of a decode step: for one stream, and for each further one
PERF = PerfReport(
    step=StepCosts(knot_tokens=[1, 1001], knot_s=[FIRST_STEP_S, FIRST_STEP_S + 1000 * ROW_S]),
    token_budget=1001,
    max_batch_size=1000,
)


class Promises:
    """What was promised, and that nobody is refused."""

    num_refused: Mapping[Reason, int] = {}

    def __init__(self) -> None:
        self.arrivals = Arrivals()

    def tightest(self, now_s: float) -> tuple[float, float]:
        return TTFT_S, TPOT_S

    def longest_wait_s(self, now_s: float) -> float:
        return 0.0


@dataclass(eq=False)
class Process:
    """A node, from its start on."""

    member: Member
    on_standby: bool
    loaded_s: float
    ends_s: float
    pid: int

    @property
    def is_ready(self) -> bool:
        return self.member.is_ready


@dataclass
class Load:
    """What users ask for."""

    rate: float = 0.0  # requests/s
    prompt_s: float = 0.01  # of one prefill node's time, for a prompt
    noise: float = 0.0


@dataclass
class World:
    """A cluster that `pdserve up --autoscale` runs, and its users."""

    scale: Scale
    first: Mapping[NodeRole, int]
    load: Load
    sleep_after_s: float = 0.0
    foresees: bool = True  # False: only what is now counts
    clock: ManualClock = field(default_factory=ManualClock)
    load_s: Callable[[str], float] = lambda name: LOAD_S  # of a node
    ends_s: Mapping[str, float] = field(default_factory=dict)  # a process of a node, after so long
    told: list[tuple[float, str]] = field(default_factory=list)  # (when, what was decided)

    def __post_init__(self) -> None:
        self.registry = Registry()
        self.processes: dict[str, Process] = {}
        self.random = random.Random(1)
        self.arrived = self.served = self.missed = 0.0  # requests
        self.node_s = 0.0  # of all processes, whatever they do
        self.promises = Promises()
        self.line = 0.0  # requests that wait for nodes
        self.queue_s = 0.0  # work of prompts
        self.streams = 0.0
        self.changes = RoleChanges(self.registry, "disaggregated", CoordinatorMetrics())
        self.loads = PoolLoads(self.registry, self.promises, self._outlook, self.clock)
        self.decide_anew()
        self.starting = Starting(self.clock, MOST_START_S)
        self.num_started = 0
        self.standby = StandbyNodes(
            self.registry, self.changes, lambda: self.desired.numbers, lambda: True, flips=True
        )
        for role, number in self.first.items():
            for index in range(number):
                self._start(f"{ROLES[role]}-{index}", on_standby=False, within_s=0.0)

    def decide_anew(self) -> None:
        """As a coordinator that has only just begun."""
        self.promises.arrivals = Arrivals()
        starts = Starts(
            self.registry, self.changes, self.clock, lambda: self.desired.numbers, flips=True
        )
        ahead = LookAhead(
            self.promises.arrivals, self.clock, starts.until_next_s, dict.fromkeys(NodeRole, 1.0)
        )
        self.desired = DesiredNodes(
            self.clock, self.sleep_after_s, ahead.at if self.foresees else nothing_foreseen
        )
        self.rebalancer = Rebalancer(self.clock)

    def _outlook(self, _: Member) -> NodeOutlook:
        return NodeOutlook(self.queue_s / max(1, self.ready(P)), 0.0, 1.0)

    def ready(self, role: NodeRole) -> int:
        return sum(p.is_ready and p.member.role is role for p in self.processes.values())

    @property
    def num_inflight(self) -> float:
        return self.line + self.queue_s / self.load.prompt_s + self.streams

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for tick in range(round(seconds / HEARTBEAT_S)):
            self.clock.advance(HEARTBEAT_S)
            self._work()
            for process in list(self.processes.values()):
                self._beat(process)
            self._coordinate()
            if tick % 2:
                self._autoscale()

    def happened(self, since_s: float = 0.0) -> Counter[str]:
        """What was decided since then, but for which node."""
        return Counter(what.rpartition(" ")[0] for at_s, what in self.told if at_s >= since_s)

    @property
    def attainment(self) -> float:
        """The share of the requests that kept both promises."""
        return 1 - self.missed / self.arrived

    # ---- users, and the work of nodes ----------------------------------------------------------

    def _work(self) -> None:
        factor = 1 + self.load.noise * self.random.uniform(-1, 1)
        come = self.load.rate * factor * HEARTBEAT_S
        for _ in range(int(self.arrived + come) - int(self.arrived)):
            self.promises.arrivals.observe("", self.load.prompt_s, self.clock.now())
        self.arrived += come
        self.line += come
        if self.ready(P) and self.ready(D):
            self.queue_s += self.line * self.load.prompt_s
            self.line = 0.0
        done_s = min(self.queue_s, self.ready(P) * HEARTBEAT_S)
        self.queue_s -= done_s
        self.busy_share = done_s / (HEARTBEAT_S * self.ready(P)) if self.ready(P) else 0.0
        self.streams += done_s / self.load.prompt_s
        if self.ready(D):
            life_s = OUTPUT_TOKENS * _step_s(self.streams / self.ready(D))
            ended = self.streams * min(1.0, HEARTBEAT_S / life_s)
            self.streams -= ended
            self.served += ended
        self.node_s += HEARTBEAT_S * len(self.processes)
        self.missed += come * self._is_late()

    def _is_late(self) -> bool:
        """Whether a request that comes now misses a promise."""
        if not (self.ready(P) and self.ready(D)):
            return True
        waits_s, gap_s = self.queue_s / self.ready(P), _step_s(self.streams / self.ready(D))
        return waits_s + self.load.prompt_s > TTFT_S or gap_s > TPOT_S

    def _beat(self, process: Process) -> None:
        """A node reports, and carries out what it was told."""
        member, now_s = process.member, self.clock.now()
        if now_s >= process.ends_s:
            self.lose(process)
            return
        if member.load.state is NodeState.DRAINING:  # its streams are elsewhere now
            del self.processes[member.node_id]
            self.registry.remove(member)
            return
        orders = [message for message in said_to(member) if isinstance(message, SetRole)]
        role = orders[-1].role if orders else member.role
        is_loaded = now_s >= process.loaded_s
        waits = process.on_standby and not orders
        report = LoadReport(
            state=NodeState.READY if is_loaded and not waits else NodeState.LOADING,
            role=role,
            is_standby=is_loaded and waits,
            free_blocks=NUM_BLOCKS,
        )
        if is_loaded and member.perf is None:
            self.registry.profiled(member, PERF)
        if process.is_ready and role is P:
            report = structs.replace(report, busy_share=self.busy_share)
        elif process.is_ready:
            report = structs.replace(report, running_requests=round(self.streams / self.ready(D)))
        self.registry.report(member, report)

    # ---- decisions -----------------------------------------------------------------------------

    def _coordinate(self) -> None:
        """As the coordinator at every heartbeat."""
        num_orders = self._num_orders()
        turn = self.rebalancer.tick(self.loads.look(), self.desired.numbers)
        if turn is not None:
            carry_out(turn, self.changes, self.desired)
            self._tell(f"flip {turn.node_id} to {ROLES[turn.role]}")
        self.desired.tick(
            self.loads.demands(POOLS["disaggregated"]), 1 if self.num_inflight > 0.5 else 0
        )
        before = num_orders + (turn is not None)
        self.standby.look()
        for _ in range(self._num_orders() - before):
            self._tell("standby begins here")

    def _num_orders(self) -> int:
        return sum(len(said_to(process.member)) for process in self.processes.values())

    def _autoscale(self) -> None:
        """As `pdserve up --autoscale` every second."""
        names = [f"{role}-{n}" for role in ("prefill", "decode") for n in range(self.scale.most)]
        started = [name for name in names if name in self.processes]
        spare = [name for name in names if name not in self.processes]
        status = self._status()
        self.starting.look(status, {name: self.processes[name].pid for name in started})
        waiting = [name for name in started if self.processes[name].on_standby]
        for step in next_steps(status, started, spare, self.scale, (), waiting, self.starting):
            self._tell(f"{step.what} {step.name}")
            self._make(step)

    def _make(self, step: ScaleStep) -> None:
        if step.what == "retire":
            member = self.processes[step.name].member
            self.registry.report(member, structs.replace(member.load, state=NodeState.DRAINING))
            return
        self._start(step.name, on_standby=step.what == "start on standby")

    def _start(self, name: str, *, on_standby: bool, within_s: float | None = None) -> None:
        role, now_s = P if name.startswith("prefill") else D, self.clock.now()
        member = join(self.registry, name, role, state=NodeState.LOADING)
        loaded_s = now_s + (self.load_s(name) if within_s is None else within_s)
        ends_s = now_s + self.ends_s.get(name, inf)
        self.num_started += 1
        self.processes[name] = Process(member, on_standby, loaded_s, ends_s, self.num_started)
        if within_s == 0.0:
            self._beat(self.processes[name])

    def lose(self, process: Process) -> None:
        """It ends by itself, and is started again."""
        self.registry.remove(process.member)
        self._start(process.member.node_id, on_standby=process.on_standby)

    def _status(self) -> ClusterStatus:
        """What `/status` says of the nodes, as far as an autoscaler asks."""
        nodes = [
            node_status(
                member.node_id,
                ROLES[member.role],
                state="ready" if member.is_ready else "loading",
                is_standby=member.is_standby,
                running_requests=member.load.running_requests,
            )
            for member in self.registry
        ]
        desired = {ROLES[role]: number for role, number in self.desired.numbers.items()}
        return ClusterStatus(
            model="m",
            mode="disaggregated",
            ready=True,
            inflight=0,
            nodes=nodes,
            coordinator=CoordinatorStatus(desired_nodes=desired),
        )

    def _tell(self, what: str) -> None:
        self.told.append((self.clock.now(), what))


def nothing_foreseen(role: NodeRole, demand: PoolDemand) -> None:
    """As Foresee."""


def by_day(now_s: float) -> float:
    """Requests/s: from 1 at night to 8 in the afternoon."""
    return 1.0 + 7.0 * sin(pi * (now_s % DAY_S) / DAY_S) ** 2


def at_noon(now_s: float) -> float:
    """2 requests/s, and 8 in one hour of each day."""
    return 8.0 if DAY_S / 2 <= now_s % DAY_S < DAY_S / 2 + 3600 else 2.0


def _step_s(batch: float) -> float:
    return FIRST_STEP_S + ROW_S * max(0.0, batch - 1)
