"""The smallest clusters that show the effect of one policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.host import Host, Sharing
from pdserve.commands.simulation.machine import Machine, scaled
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.step_times import ResidualScatter, Scatter
from pdserve.engine.kv.shortage import Victims
from pdserve.measured.calibration import Residuals
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import NodeRole, TransferCosts
from pdserve.settings.config import (
    DecodePolicyName,
    Headroom,
    Mode,
    PolicyConfig,
    PrefillPolicyName,
    RouterName,
)
from tests.simulation.fronts import Straight
from tests.simulation.machines import A100_13B
from tests.simulation.score import Score, scored

# Prefills and hands off in no time, so that a node fed by it shows the effect of decoding alone.
INSTANT = replace(
    A100_13B,
    costs=scaled(A100_13B.costs, 1e-6),
    num_kv_tokens=1 << 22,
    transfer=TransferCosts(transport="none", fixed_s=0.0, bytes_per_s=1e15),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A score, and the node that it belongs to."""

    score: Score
    node: Node


def prefill_policy(name: PrefillPolicyName, chunk: int = 0) -> PolicyConfig:
    return PolicyConfig(prefill_policy=name, prefill_chunk=chunk)


def decode_policy(name: DecodePolicyName, headroom: Headroom = "reserve-dynamic") -> PolicyConfig:
    return PolicyConfig(decode_policy=name, kv_headroom=headroom)


def prefill_only(
    calls: Iterable[Call],
    policy: PolicyConfig,
    machine: Machine = A100_13B,
    believed: PerfModel | None = None,
) -> Run:
    """Run one prefill node; every call ends with token 1."""
    events = Events()
    node = Node("prefill", NodeRole.PREFILL, machine, events, policy, believed=believed)
    cluster = Cluster(events, [node])
    short = [replace(call, num_output=1) for call in calls]
    return Run(scored(cluster, Straight(cluster, node, None), short), node)


def decode_only(
    calls: Iterable[Call],
    policy: PolicyConfig,
    machine: Machine = A100_13B,
    believed: PerfModel | None = None,
    victims: Victims | None = None,
    expected: Callable[[Call], int] = lambda call: 0,
) -> Run:
    """Run one decode node that receives prefilled prompts; `victims` replaces its own rule.

    `expected`: tokens that its coordinator expects of an answer; 0: unknown.
    """
    events = Events()
    source = Node("source", NodeRole.PREFILL, INSTANT, events, PolicyConfig())
    node = Node(
        "decode", NodeRole.DECODE, machine, events, policy, believed=believed, victims=victims
    )
    cluster = Cluster(events, [source, node])
    return Run(scored(cluster, Straight(cluster, source, node, expected), calls), node)


def colocated(calls: Iterable[Call], policy: PolicyConfig, machine: Machine = A100_13B) -> Run:
    """Run one decode node that prefills for itself."""
    events = Events()
    node = Node("decode", NodeRole.DECODE, machine, events, policy)
    cluster = Cluster(events, [node])
    return Run(scored(cluster, Straight(cluster, None, node), calls), node)


def disaggregated(calls: Iterable[Call], policy: PolicyConfig, machine: Machine = A100_13B) -> Run:
    """Run one prefill node and one decode node; the latter is returned."""
    events = Events()
    prefill = Node("prefill", NodeRole.PREFILL, machine, events, policy)
    decode = Node("decode", NodeRole.DECODE, machine, events, policy)
    cluster = Cluster(events, [prefill, decode])
    return Run(scored(cluster, Straight(cluster, prefill, decode), calls), decode)


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A score, and the nodes, prefill nodes first."""

    score: Score
    nodes: list[Node]
    num_moved: int  # streams, in flowing mode


def fleet(
    num_prefill: int,
    num_decode: int,
    mode: Mode,
    calls: Iterable[Call],
    policy: PolicyConfig,
    machine: Machine = A100_13B,
    *,
    router: RouterName = "predicted",
    admission: bool = False,
    wrong_by: float = 1.0,
    sharing: Sharing | None = None,
) -> FleetRun:
    """Run both pools behind the real coordinator's router, with its admission if wanted.

    `wrong_by`: initially, the nodes' profiles say so many times the true seconds. `sharing`: all
    nodes are on one host; otherwise each has its own.
    """
    events = Events()
    host = Host("shared", events, sharing) if sharing else None
    roles = [NodeRole.PREFILL] * num_prefill + [NodeRole.DECODE] * num_decode
    nodes = [
        Node(
            f"{role.name.lower()}-{number}",
            role,
            machine,
            events,
            policy,
            believed=machine.perf(wrong_by),
            host=host,
        )
        for number, role in enumerate(roles)
    ]
    cluster = Cluster(events, nodes)
    front = Coordinator(cluster, mode, router, admission=admission)
    return FleetRun(scored(cluster, front, calls), nodes, front.moves.num_done)


def noise(seed: str, spread: float) -> Scatter:
    """Return a source of log-normal factors around 1 for step times."""
    random = Random(seed)
    drawn = [[random.lognormvariate(0.0, spread)] for _ in range(10_000)]
    return ResidualScatter(Residuals(drawn, drawn, drawn), seed)
