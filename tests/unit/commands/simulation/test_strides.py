"""Steps of an unchanged batch are skipped, and the results are those of single steps to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import Mode, PolicyConfig
from tests.matrix import examples, matrix
from tests.simulation.machines import A100_13B
from tests.simulation.scenarios import noise
from tests.simulation.score import scored
from tests.simulation.workload import calls, lognormal, merged, poisson

CHAT = Slo(name="chat", ttft_s=2.0, tpot_s=0.06, hold_s=1.5)
BATCH = Slo(name="batch", weight=0.5)
NODES: dict[Mode, tuple[int, int]] = {
    "disaggregated": (1, 2),
    "colocated": (0, 2),
    "adaptive": (1, 1),
}

Seen = tuple[list[tuple[list[float], int, bool]], list[tuple[int, float, float, float, int]]]


def simulated(
    mode: Mode, policy: PolicyConfig, kv_tokens: int, per_s: float, seed: int, *, strides: bool
) -> Seen:
    """Return what users saw of each call, and what each node has learnt and holds."""
    machine = replace(A100_13B, num_kv_tokens=kv_tokens, block_size=16)
    prompt, answer = lognormal(500, 1.0, 3000), lognormal(80, 0.9, 400)
    load = merged(
        calls(f"a{seed}", poisson(per_s, 15, seed), prompt, answer, CHAT, prefixes=[64, 500]),
        calls(f"b{seed}", poisson(per_s / 3, 15, seed + 1), prompt, answer, BATCH),
    )
    events = Events()
    num_prefill, num_decode = NODES[mode]
    roles = [NodeRole.PREFILL] * num_prefill + [NodeRole.DECODE] * num_decode
    nodes = [
        Node(
            f"node-{number}", role, machine, events, policy,
            scatter=noise(f"{seed} {number}", 0.1), strides=strides,
        )
        for number, role in enumerate(roles)
    ]  # fmt: skip
    cluster = Cluster(events, nodes)
    score = scored(cluster, Coordinator(cluster, mode, admission=bool(seed % 2)), load)
    users = [(o.token_times_s, o.num_cached_tokens, o.was_refused) for o in score.outcomes]
    return users, [
        (n.num_steps, n.busy_s, n.perf.prefill_ratio, n.perf.decode_ratio, n.pool.num_cached)
        for n in nodes
    ]


@pytest.mark.long
@settings(max_examples=examples(12), deadline=None)
@given(
    mode=st.sampled_from(sorted(NODES)),
    decode_policy=st.sampled_from(["tpot-cap", "max-batch", "static", "slack-batch"]),
    kv_tokens=st.sampled_from([5 * 1024, 12 * 1024, 128 * 1024]),
    per_s=st.sampled_from([0.5, 2.0, 4.0]),
    seed=st.integers(0, 1000),
)
def test_strides_change_no_result(
    mode: Mode, decode_policy: str, kv_tokens: int, per_s: float, seed: int
) -> None:
    """With little memory, blocks are evicted and streams preempted in the middle of strides."""
    policy = PolicyConfig(decode_policy=decode_policy, kv_headroom="greedy")
    case = mode, policy, kv_tokens, per_s, seed
    assert simulated(*case, strides=True) == simulated(*case, strides=False)


@pytest.mark.parametrize("mode", matrix(NODES, 1))
def test_the_same_seed_gives_the_same_results_and_another_one_others(mode: Mode) -> None:
    case = mode, PolicyConfig(), 64 * 1024, 1.0
    once = simulated(*case, 1, strides=True)
    assert simulated(*case, 1, strides=True) == once
    assert simulated(*case, 2, strides=True) != once
