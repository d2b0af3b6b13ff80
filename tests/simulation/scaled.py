"""A cluster that grows and shrinks as its coordinator says, request by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from coordinator.nodes.registry import Member
from coordinator.pools.desired import POOLS, DesiredNodes, Foresee
from coordinator.pools.loads import PoolLoads
from coordinator.pools.lookahead import LookAhead
from coordinator.status import ROLES
from pdserve.commands.cluster.autoscale import ScaleStep, next_steps
from pdserve.commands.cluster.config import Scale
from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import HEARTBEAT_S, Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.handoff import RoomLine
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.node import Node
from pdserve.protocol import LoadReport, NodeRole, NodeState
from pdserve.protocol.status import ClusterStatus, CoordinatorStatus, NodeStatus
from pdserve.settings.config import PolicyConfig
from tests.fakes.statuses import node_status
from tests.simulation.score import Score

START_S = 30.0  # from the start of a process until it can work
_MODE = "disaggregated"


class Growing(Cluster):
    """A cluster to which nodes come, each a process of its own."""

    def __init__(self, events: Events, machine: Machine, first: Sequence[NodeRole]) -> None:
        self._machine = machine
        self._numbers = dict.fromkeys(NodeRole, 0)
        super().__init__(events, [])
        self.nodes: list[Node] = []
        for role in first:
            self.add(role)

    def add(self, role: NodeRole) -> Node:
        name = f"{ROLES[role]}-{self._numbers[role]}"
        self._numbers[role] += 1
        node = Node(name, role, self._machine, self.events, PolicyConfig())
        node.world = self
        self.nodes.append(node)
        self._rooms[node] = RoomLine(node, self.events)
        return node

    def next_name(self, role: NodeRole, ahead: int) -> str:
        return f"{ROLES[role]}-{self._numbers[role] + ahead}"


class Scaled(Coordinator):
    """Follows the numbers of nodes that the policy desires, as `pdserve up --autoscale` does."""

    def __init__(
        self, cluster: Growing, scale: Scale, most: int, *, foresees: bool, start_s: float
    ) -> None:
        """`most`: of both pools together."""
        self._ready_s: dict[Node, float] = {}
        self._draining: set[Node] = set()
        self._busy_s: dict[Node, float] = {}
        self._grown = cluster
        super().__init__(cluster, _MODE, admission=True)
        self._scale, self._most, self._start_s = scale, most, start_s
        self.node_s = 0.0
        self.steps: list[tuple[float, ScaleStep]] = []
        clock = cluster.events
        self._loads = PoolLoads(
            self._registry,
            self.admission,
            self.router.node_outlook,
            clock,
        )
        prices = dict.fromkeys(NodeRole, 1.0)
        ahead = LookAhead(self.admission.arrivals, clock, lambda role: start_s, prices)
        foresee: Foresee = ahead.at if foresees else lambda role, demand: None
        self.desired = DesiredNodes(clock, foresee=foresee)

    def _heartbeat(self) -> None:
        super()._heartbeat()
        self.node_s += HEARTBEAT_S * len(self._members)
        for node in [*self._draining]:
            if node.core.num_requests == 0 and not node.num_pinned_blocks:
                self._draining.remove(node)
                self._registry.remove(self._members.pop(node))
        self.desired.tick(self._loads.demands(POOLS[_MODE]), 1)
        for step in self._next_steps():
            self.steps.append((self._events.now_s, step))
            if step.what == "retire":
                self._draining.add(self._nodes[step.name])
            elif len(self._members) - len(self._draining) < self._most:
                self._begin(self._grown.add(_role_of(step.name)))

    def _begin(self, node: Node) -> None:
        self._ready_s[node] = self._events.now_s + self._start_s
        self._nodes[node.name] = node
        self._members[node] = self._join(node)

    def _next_steps(self) -> list[ScaleStep]:
        nodes = [_told(member) for node, member in self._members.items()]
        spare = [
            self._grown.next_name(role, ahead) for role in NodeRole for ahead in range(self._most)
        ]
        desired = {ROLES[role]: number for role, number in self.desired.numbers.items()}
        status = ClusterStatus(
            model="m",
            mode=_MODE,
            ready=True,
            inflight=0,
            nodes=nodes,
            coordinator=CoordinatorStatus(desired_nodes=desired),
        )
        steps = next_steps(status, [node.node_id for node in nodes], spare, self._scale)
        return [step for step in steps if step.what != "start on standby"]

    def _load(self, node: Node) -> LoadReport:
        report, now_s = super()._load(node), self._events.now_s
        busy_s = node.busy_s - self._busy_s.get(node, 0.0)
        self._busy_s[node] = node.busy_s
        state = NodeState.READY
        if now_s < self._ready_s.get(node, 0.0):
            state = NodeState.LOADING
        elif node in self._draining:
            state = NodeState.DRAINING
        return replace(report, state=state, busy_share=min(1.0, busy_s / HEARTBEAT_S))


def scaled(
    calls: Iterable[Call],
    machine: Machine,
    first: tuple[int, int],
    most: int,
    *,
    foresees: bool,
    start_s: float = START_S,
) -> tuple[Score, Scaled]:
    """Run these calls; `first`: nodes of each pool at the beginning, `most` of both together."""
    events = Events()
    roles = [NodeRole.PREFILL] * first[0] + [NodeRole.DECODE] * first[1]
    cluster = Growing(events, machine, roles)
    front = Scaled(cluster, Scale(1, most), most, foresees=foresees, start_s=start_s)
    outcomes = []
    cluster.run(front, calls, outcomes.append)
    return Score(outcomes), front


def _role_of(name: str) -> NodeRole:
    return NodeRole.PREFILL if name.startswith("prefill") else NodeRole.DECODE


def _told(member: Member) -> NodeStatus:
    """What `/status` says of a node, as far as an autoscaler asks."""
    return node_status(
        member.node_id,
        ROLES[member.role],
        state="ready" if member.is_ready else "loading",
        queued_tokens=member.load.queued_tokens,
        running_requests=member.load.running_requests,
    )
