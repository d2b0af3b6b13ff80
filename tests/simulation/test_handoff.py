"""Handoffs: back-pressure, prefixes on both sides, and no lost blocks (`Cluster.run`)."""

from dataclasses import replace

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.node import Node
from pdserve.protocol import NodeRole, Slo, TransferCosts
from pdserve.settings.config import PolicyConfig
from tests.matrix import matrix
from tests.simulation.fronts import Straight
from tests.simulation.machines import A100_13B
from tests.simulation.scenarios import disaggregated, noise
from tests.simulation.score import Score, gaps_s, scored
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson, uniform

POLICY = PolicyConfig(prefill_policy="edf-slack", decode_policy="tpot-cap")


def pair(load: list[Call], prefill: Machine, decode: Machine, policy: PolicyConfig) -> Score:
    events = Events()
    source = Node("prefill", NodeRole.PREFILL, prefill, events, policy)
    target = Node("decode", NodeRole.DECODE, decode, events, policy)
    cluster = Cluster(events, [source, target])
    return scored(cluster, Straight(cluster, source, target), load)


@pytest.mark.parametrize("policy", matrix(["fcfs-budget", "sjf-aging", "edf-slack", "buckets"], 1))
@pytest.mark.parametrize("num_kv_tokens", matrix([9 * 1024, 16 * 1024], 1))
def test_unpulled_kv_holds_prompts_back_and_nothing_gets_stuck(policy, num_kv_tokens):
    """Both pools hold little more than the longest prompt, and decoding is the bottleneck."""
    tiny = replace(A100_13B, num_kv_tokens=num_kv_tokens)
    load = calls("c", poisson(3, 20, seed=1), uniform(100, 8000), uniform(2, 200))
    config = PolicyConfig(prefill_policy=policy)
    score = pair(load, tiny, tiny, config)
    assert len(score.served) == len(load)


@pytest.mark.parametrize("policy", matrix(["max-batch", "tpot-cap", "slack-batch", "static"], 1))
@pytest.mark.parametrize("headroom", matrix(["greedy", "reserve-static", "reserve-dynamic"], 1))
def test_every_decode_policy_ends_everything_with_little_memory(policy, headroom):
    tiny = replace(A100_13B, num_kv_tokens=5 * 1024, block_size=16, max_batch_size=8)
    slow, quick = Slo(name="a", tpot_s=0.2), Slo(name="b", tpot_s=0.03, priority=1)
    load = merged(
        calls("x", poisson(1.5, 10, seed=1), uniform(10, 1500), uniform(1, 500), slow),
        calls("y", poisson(1.5, 10, seed=2), uniform(10, 1500), uniform(1, 500), quick),
    )
    config = PolicyConfig(decode_policy=policy, kv_headroom=headroom)
    assert len(pair(load, tiny, tiny, config).served) == len(load)


def test_a_pool_holds_as_many_streams_as_windows_and_states_leave_room_for():
    """Three layers of four see 64 tokens, so a stream holds about a quarter; or it has a state."""
    load = calls("c", [0.0] * 12, fixed(1500), fixed(100))
    whole = replace(A100_13B, num_kv_tokens=4 * 1024, block_size=16)
    batches = []
    state = replace(whole, state_bytes=1000 * whole.kv_token_bytes)
    for machine in (whole, replace(whole, windows=(64, 64, 64, 0)), state):
        events = Events()
        source = Node("prefill", NodeRole.PREFILL, A100_13B, events, POLICY)
        target = Node("decode", NodeRole.DECODE, machine, events, POLICY)
        cluster = Cluster(events, [source, target])
        assert len(scored(cluster, Straight(cluster, source, target), load).served) == 12
        batches.append(target.largest_batch)
    assert batches[0] == 2
    assert batches[1] >= 7
    assert batches[2] == 1


def test_kv_is_pulled_while_the_prompt_is_still_computed():
    """Over a slow network, only a long prompt's last chunk is left to pull when it is computed."""
    slow = replace(
        A100_13B, transfer=TransferCosts(transport="tcp", fixed_s=0.002, bytes_per_s=2e9)
    )
    load = calls("c", [0.0], fixed(8192), fixed(2), Slo(name="a", ttft_s=60.0))
    whole_s = 8192 * slow.kv_token_bytes / 2e9
    in_chunks = pair(load, slow, slow, PolicyConfig(prefill_chunk=1024)).outcomes[0]
    assert gaps_s(in_chunks)[0] < 0.5 * whole_s


def test_what_a_decode_node_holds_is_not_pulled_again():
    slow = replace(
        A100_13B, transfer=TransferCosts(transport="tcp", fixed_s=0.002, bytes_per_s=1e9)
    )
    load = calls("c", [0.0, 30.0], fixed(64), fixed(2), prefixes=[6000])
    first, second = pair(load, slow, slow, POLICY).outcomes
    assert second.num_cached_tokens >= 5952
    assert gaps_s(second)[0] < 0.3 * gaps_s(first)[0]


def test_with_states_a_prefix_is_cached_up_to_where_prompts_part():
    """The second prompt finds the KV but no state there, and leaves one for the third."""
    machine = replace(A100_13B, state_bytes=100 * A100_13B.kv_token_bytes)
    load = calls("c", [0.0, 30.0, 60.0], fixed(64), fixed(600), prefixes=[6000])
    first, second, third = pair(load, machine, machine, POLICY).outcomes
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert third.num_cached_tokens >= 5952


def test_noise_in_the_times_of_steps_does_not_matter():
    """Targets are met although step times match the prediction only on average."""
    load = calls(
        "c", poisson(2, 60, seed=1), lognormal(1000, 0.8, 4000), lognormal(100, 0.5, 400),
        Slo(name="a", ttft_s=2.0, tpot_s=0.06),
    )  # fmt: skip
    events = Events()
    source, target = (
        Node(role.name, role, A100_13B, events, POLICY, scatter=noise(role.name, 0.2))
        for role in (NodeRole.PREFILL, NodeRole.DECODE)
    )
    cluster = Cluster(events, [source, target])
    score = scored(cluster, Straight(cluster, source, target), load)
    assert score.attainment > 0.97
    assert target.perf.decode_ratio == pytest.approx(1.0, abs=0.1)


def test_the_same_run_gives_the_same_times():
    load = calls("c", poisson(3, 20, seed=1), lognormal(800, 0.8, 4000), lognormal(50, 0.5, 200))
    once, again = (disaggregated(load, POLICY).score for _ in range(2))
    assert [o.token_times_s for o in once.outcomes] == [o.token_times_s for o in again.outcomes]
