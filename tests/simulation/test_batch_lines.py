"""Lines of a batch take what a foreground leaves of the nodes, and nothing of its promises."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from coordinator.jobs.places import PER_NODE
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.outcome import Outcome
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import Mode, PolicyConfig
from tests.matrix import matrix
from tests.simulation.machines import ONE_CORE_53M
from tests.simulation.workload import calls, lognormal, poisson

LASTS_S = 20.0
RATE = 0.6  # of two nodes it takes a third
PROMISED = Slo(name="interactive", priority=1, ttft_s=2.0, tpot_s=0.1)
PROMPT, ANSWER = lognormal(512, 0.6, 2000), lognormal(128, 0.6, 512)
NODES: dict[Mode, tuple[int, int]] = {
    "colocated": (0, 2),
    "adaptive": (1, 1),
    "disaggregated": (1, 1),
}


@dataclass(frozen=True, slots=True)
class Shares:
    """Of one run."""

    busy: float  # of the nodes' seconds
    kept: float  # of the foreground's promises


def run(mode: Mode, num_lines: int) -> Shares:
    """Run the foreground, beside so many lines that follow each other without an end."""
    events = Events()
    roles = [
        role for role, number in zip(NodeRole, NODES[mode], strict=True) for _ in range(number)
    ]
    nodes = [
        Node(f"n{number}", role, ONE_CORE_53M, events, PolicyConfig())
        for number, role in enumerate(roles)
    ]
    cluster = Cluster(events, nodes)
    front = Coordinator(cluster, mode, "predicted", admission=True)
    load = calls("foreground", poisson(RATE, LASTS_S, 1), PROMPT, ANSWER, PROMISED)
    batch = calls("line", [0.0] * 1000 * bool(num_lines), PROMPT, ANSWER, Slo(name="batch"))
    following = [
        line if number < num_lines else replace(line, after=batch[number - num_lines].call_id)
        for number, line in enumerate(batch)
    ]
    seen: list[Outcome] = []
    by_time = sorted([*load, *following], key=lambda call: call.at_s)
    cluster.run(front, by_time, seen.append, until_s=LASTS_S)
    for node in nodes:
        node.sync()
    ended = [outcome for outcome in seen if outcome.call.slo == PROMISED]
    busy_s = sum(node.busy_s for node in nodes)
    return Shares(busy_s / LASTS_S / len(nodes), sum(map(keeps, ended)) / len(ended))


def keeps(outcome: Outcome) -> bool:
    if outcome.was_refused:
        return False
    first_s, last_s = outcome.token_times_s[0], outcome.token_times_s[-1]
    gaps = len(outcome.token_times_s) - 1
    in_time = first_s - outcome.call.at_s <= PROMISED.ttft_s
    return in_time and last_s - first_s <= PROMISED.tpot_s * gaps


@pytest.mark.parametrize("mode", matrix(NODES, {"colocated"}))
def test_a_batch_takes_what_is_idle_and_no_promise(mode: Mode) -> None:
    alone, beside = run(mode, 0), run(mode, PER_NODE * sum(NODES[mode]))
    assert 0.2 < alone.busy < 0.4
    assert (beside.busy - alone.busy) / (1 - alone.busy) > 0.9
    assert beside.kept > alone.kept - 0.01
