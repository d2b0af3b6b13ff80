"""Compares prefill policies: traces, replayed on one simulated prefill node.

    python -m tests.simulation.compare_prefill_policies --trace FILE [--trace FILE ...]

The node is an A100 with a 13B model (`machines.py`). Every call wants one token, so that only the
order of prompts matters. Each trace is slowed down or sped up as a whole until its prompts keep the
node busy for the wanted share of the time, not counting work that the prefix cache saves. Two kinds
of TTFT targets are tried: one for all calls, and one in proportion to each prompt's own time alone
(as in Splitwise), at least half a second.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.node import Node
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import PolicyConfig, PrefillPolicyName
from tests.simulation.fronts import Straight
from tests.simulation.machines import A100_13B
from tests.simulation.score import Score, scored
from tests.simulation.traces import read_trace

Promise = Literal["same", "proportional"]

STRETCH = 5.0  # proportional TTFT targets, as multiples of the time alone
LEAST_S = 0.5
SMALL_CHUNK = 512  # tokens


def main() -> None:
    """Print a table for every trace, kind of target and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 0.95, 1.2])
    parser.add_argument("--calls", type=int, default=1000, help="of each trace, from its beginning")
    parser.add_argument("--ttft", type=float, default=0.0, help="promise to all; 0: 5 x mean alone")
    options = parser.parse_args()
    for path in options.trace:
        calls = [replace(call, num_output=1) for call in read_trace(path, options.calls)]
        busy_s = _busy_s(calls)
        ttft_s = options.ttft or STRETCH * busy_s / len(calls)
        for promise in get_args(Promise):
            for load in options.loads:
                _print_table(path, calls, busy_s, promise, ttft_s, load)


def replay(calls: list[Call], policy: PolicyConfig, machine: Machine) -> tuple[Score, Node]:
    """Replay these calls on one prefill node under this policy."""
    events = Events()
    node = Node("prefill", NodeRole.PREFILL, machine, events, policy)
    cluster = Cluster(events, [node])
    return scored(cluster, Straight(cluster, node, None), calls), node


def _machine(calls: list[Call]) -> Machine:
    """Return a machine with room for several of the longest prompts."""
    longest = max(call.prompt.num_tokens for call in calls)
    return replace(A100_13B, num_kv_tokens=max(A100_13B.num_kv_tokens, 4 * longest), block_size=256)


def _busy_s(calls: list[Call]) -> float:
    """Return how long these prompts keep a node busy, less what its prefix cache saves."""
    _, node = replay(calls, PolicyConfig(prefill_policy="fcfs-budget"), _machine(calls))
    return node.busy_s


def _promised(
    calls: list[Call], promise: Promise, ttft_s: float, load: float, busy_s: float
) -> list[Call]:
    perf = A100_13B.perf()
    speed = load * (calls[-1].at_s - calls[0].at_s) / busy_s
    made = []
    for call in calls:
        if promise == "proportional":
            alone_s = perf.prefill_s(call.prompt.num_tokens, 0, A100_13B.token_budget)
            ttft_s = max(LEAST_S, STRETCH * alone_s)
        made.append(replace(call, at_s=call.at_s / speed, slo=Slo(ttft_s=ttft_s)))
    return made


def _print_table(
    path: Path, calls: list[Call], busy_s: float, promise: Promise, ttft_s: float, load: float
) -> None:
    promised = _promised(calls, promise, ttft_s, load, busy_s)
    kept = f"{ttft_s:.2f} s" if promise == "same" else f"{STRETCH:g} x alone"
    print(f"\n{path.stem}, load {load:g}, TTFT {kept}")  # noqa: T201
    print("policy        chunk  attained    mean     p50     p90     p99    max")  # noqa: T201
    for policy in policies():
        score, _ = replay(promised, policy, _machine(calls))
        times = [score.mean_ttft_s, *(score.ttft_s(p) for p in (50, 90, 99, 100))]
        print(  # noqa: T201
            f"{policy.prefill_policy:13} {policy.prefill_chunk:5} "
            f"{score.ttft_attainment:8.1%} " + " ".join(f"{t:7.2f}" for t in times)
        )


def policies() -> list[PolicyConfig]:
    """Return all policies with automatic chunk sizes, and one with small chunks."""
    names: tuple[PrefillPolicyName, ...] = get_args(PrefillPolicyName)
    automatic = [PolicyConfig(prefill_policy=name) for name in names]
    return [*automatic, PolicyConfig(prefill_policy="edf-slack", prefill_chunk=SMALL_CHUNK)]


if __name__ == "__main__":
    main()
