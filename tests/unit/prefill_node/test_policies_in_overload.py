"""Prompts that keep coming: nobody starves, nothing deadlocks, a flood does not ruin everybody."""

from __future__ import annotations

import itertools
import random
from math import inf
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.engine.prompts.order import DueWithSlack, QueuedPrompt
from pdserve.engine.request import Request
from pdserve.lifecycle import Targets
from pdserve.settings.config import PrefillPolicyName
from pdserve.shared.clock import ManualClock
from tests.matrix import examples, matrix
from tests.requests import make_request
from tests.unit.prefill_node.prefills import BLOCK, BUDGET, TOKEN_S, Prefills, make_perf

NAMES: list[PrefillPolicyName] = list(get_args(PrefillPolicyName))

prompts = st.tuples(
    st.integers(20, 300),  # tokens
    st.sampled_from([0.1, 1.0, 5.0, inf]),  # TTFT promised
    st.sampled_from(["a", "b"]),  # class
    st.sampled_from([0, 16, 64]),  # tokens of a common prefix
)


@settings(max_examples=examples(30))
@given(
    name=st.sampled_from(NAMES),
    before=st.lists(prompts, min_size=1, max_size=6),
    after=st.lists(prompts, min_size=1, max_size=4),
    num_blocks=st.integers(80, 300),
    num_kept_free=st.integers(0, 70),
    budget=st.integers(64, 300),
)
@example(  # those begun to fill a step were as many as may be half-done, whenever it was first
    name="edf-slack",
    before=[(43, 0.1, "a", 0), (251, 0.1, "b", 0), (126, 0.1, "a", 0), (238, 0.1, "a", 0)],
    after=[(43, 0.1, "a", 0)],
    num_blocks=80,
    num_kept_free=0,
    budget=64,
)
@example(  # those of the other class held the blocks, whenever it was first
    name="edf-slack",
    before=[(43, 0.1, "a", 0), (251, 0.1, "b", 0), (126, 0.1, "a", 0), (238, 0.1, "a", 0)],
    after=[(43, 0.1, "a", 0), (64, 0.1, "b", 0), (126, 0.1, "a", 0), (238, inf, "b", 16)],
    num_blocks=80,
    num_kept_free=0,
    budget=64,
)
def test_everybody_is_served_while_others_keep_coming(
    name: PrefillPolicyName,
    before: list[tuple[int, float, str, int]],
    after: list[tuple[int, float, str, int]],
    num_blocks: int,
    num_kept_free: int,
    budget: int,
) -> None:
    """More come than can be served, all of the same priority."""
    prefills = Prefills(
        name, num_blocks=num_blocks, num_kept_free=num_kept_free, token_budget=budget
    )
    first = [submit(prefills, prompt) for prompt in before]
    coming = itertools.cycle(after)
    num_come = 0
    while any(request.lifecycle.first_token_s is None for request in first):
        while num_come < 1.2 * prefills.clock.now() / TOKEN_S:
            num_come += submit(prefills, next(coming)).num_tokens
        assert prefills.step(), "somebody waits and nobody runs"
        assert prefills.clock.now() < 200.0


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(NAMES),
    wanted=st.lists(st.tuples(prompts, st.integers(0, 2)), min_size=1, max_size=20),
    num_blocks=st.integers(76, 120),
    num_kept_free=st.integers(0, 76),
    num_gone=st.integers(0, 10),
    budget=st.integers(1, 100),
)
def test_all_blocks_come_back(
    name: PrefillPolicyName,
    wanted: list[tuple[tuple[int, float, str, int], int]],
    num_blocks: int,
    num_kept_free: int,
    num_gone: int,
    budget: int,
) -> None:
    """Whatever their priorities, in a pool for one long prompt, some of them cancelled."""
    prefills = Prefills(
        name, num_blocks=num_blocks, num_kept_free=num_kept_free, token_budget=budget
    )
    requests = []
    for prompt, priority in wanted:
        requests.append(submit(prefills, prompt, priority))
        prefills.step()
    for request in requests[:num_gone]:
        prefills.core.cancel(request.request_id)
    prefills.run()  # asserts it


@pytest.mark.parametrize("seed", matrix(range(3), 1))
def test_twice_of_what_fits_is_as_good_as_what_fits_if_the_hopeless_go_last(seed: int) -> None:
    once, twice = (in_time_per_s("edf-slack", load, seed) for load in (0.9, 2.0))
    assert twice > 0.9 * once
    assert in_time_per_s("fcfs-budget", 2.0, seed) < 0.5 * twice, "all of them come too late"


@pytest.mark.parametrize("seed", matrix(range(3), 1))
def test_shortest_first_lowers_the_mean_wait(seed: int) -> None:
    assert mean_wait_s("sjf-aging", seed) < 0.7 * mean_wait_s("fcfs-budget", seed)


@pytest.mark.parametrize("seed", matrix(range(3), 1))
def test_short_ones_among_long_ones_are_in_time_if_they_are_given_way_to(seed: int) -> None:
    """Where first come first served makes them wait for the end of a long one."""
    kept = {name: in_time_per_s(name, 0.7, seed, long_share=0.1) for name in NAMES}
    first_come = kept.pop("fcfs-budget")
    del kept["laps"]  # what no prompt saturates, as here, has no long ones by its rule
    assert min(kept.values()) > 1.15 * first_come


# ---- scenarios ---------------------------------------------------------------------------------


def submit(prefills: Prefills, prompt: tuple[int, float, str, int], priority: int = 0) -> Request:
    num_tokens, ttft_s, payer, prefix = prompt
    prefix = min(prefix, num_tokens)
    assert num_tokens <= prefills.pool.num_blocks * BLOCK
    return prefills.submit(num_tokens, ttft_s=ttft_s, payer=payer, prefix=prefix, priority=priority)


def played(
    name: PrefillPolicyName, load: float, seed: int, long_share: float, seconds: float = 60.0
) -> tuple[Prefills, list[Request]]:
    """Poisson arrivals of this many ms of work a ms; 2 s for the TTFT, 8 s for the long ones."""
    prefills = Prefills(name, num_blocks=100_000)
    draw = random.Random(seed)
    mean_tokens = 200 * (1 - long_share) + 3000 * long_share
    arrives_s = 0.0
    requests = []
    while arrives_s < seconds:
        arrives_s += draw.expovariate(load * 1000 / mean_tokens)
        is_long = draw.random() < long_share
        num_tokens = draw.randint(2500, 3500) if is_long else draw.randint(100, 300)
        while prefills.clock.now() < arrives_s and prefills.step():
            pass
        prefills.clock.advance(max(0.0, arrives_s - prefills.clock.now()))
        requests.append(prefills.submit(num_tokens, ttft_s=8.0 if is_long else 2.0))
    prefills.run()
    return prefills, requests


def in_time_per_s(
    name: PrefillPolicyName, load: float, seed: int, long_share: float = 0.0
) -> float:
    prefills, requests = played(name, load, seed, long_share)
    return sum(map(prefills.was_in_time, requests)) / 60.0


def mean_wait_s(name: PrefillPolicyName, seed: int) -> float:
    _, requests = played(name, 0.8, seed, 0.05)
    waits = [
        r.lifecycle.first_token_s - r.lifecycle.received_s
        for r in requests
        if r.lifecycle.first_token_s is not None
    ]
    assert len(waits) == len(requests)
    return sum(waits) / len(waits)


def test_payers_of_long_ago_are_forgotten() -> None:
    """Tenants come and go for as long as a node lives; each had a prompt that was late."""
    clock = ManualClock()
    rule = DueWithSlack(make_perf(), BUDGET, clock)
    for number in range(1000):
        request = make_request([1] * 20, targets=Targets(payer=f"t{number}", first_token_s=0.0))
        rule.order([QueuedPrompt(request, 20)], clock.now())
        rule.served(request, 0.1)
        clock.advance(1.0)
    assert len(rule._late) < 200
