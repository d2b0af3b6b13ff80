"""Workloads: the same requests for everybody, at any rate, with the prefixes of the trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdserve.commands.bench.compare.cases import made_up, replayed
from pdserve.commands.bench.load.client import PLAIN_IDS
from pdserve.commands.bench.load.scenarios import (
    MODEL_LEN,
    SCENARIOS,
    Lengths,
    RequestKind,
    Scenario,
)
from pdserve.commands.bench.load.traces import TraceRow
from pdserve.commands.bench.load.workload import (
    SyntheticWorkload,
    TraceWorkload,
    Workload,
    draw,
    trace_factor,
)
from pdserve.shared.errors import ConfigError

MIXED = Scenario(
    name="mixed",
    shows="",
    kinds=(
        RequestKind("chat", 4, Lengths(20, 0.5, 5, 80), Lengths(10, 0.0, 10, 10)),
        RequestKind("long", 1, Lengths(300, 0.0, 300, 300), Lengths(2, 0.0, 2, 2)),
    ),
    ttft_scale=2.0,
    tpot_scale=2.0,
)


def test_the_seed_decides_and_nothing_else() -> None:
    one, same = (SyntheticWorkload(MIXED, 3).timed(5.0, 50) for _ in range(2))
    assert one == same
    assert one != SyntheticWorkload(MIXED, 4).timed(5.0, 50)


def test_rates_differ_in_their_times_only() -> None:
    slow = SyntheticWorkload(MIXED, 0).timed(2.0, 40)
    fast = SyntheticWorkload(MIXED, 0).timed(4.0, 40)
    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert [r.at_s for r in slow] == pytest.approx([2 * r.at_s for r in fast])


def test_arrivals_are_those_of_a_poisson_process_with_exactly_this_rate() -> None:
    times = [request.at_s for request in SyntheticWorkload(MIXED, 1).timed(50.0, 2000)]
    gaps = np.diff(times)
    assert 39.9 < max(times) < 40
    assert len(times) == 2000
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)


def test_every_deck_has_the_mixture() -> None:
    kinds = [request.kind for request in SyntheticWorkload(MIXED, 0).first(50)]
    decks = [kinds[i : i + 5] for i in range(0, 50, 5)]
    assert all(deck.count("long") == 1 for deck in decks)
    assert len({tuple(deck) for deck in decks}) > 1


def test_prompts_are_plain_ids_that_share_nothing() -> None:
    requests = SyntheticWorkload(MIXED, 0).first(50)
    assert {token for request in requests for token in request.prompt} <= set(PLAIN_IDS)
    assert len({tuple(request.prompt[:5]) for request in requests}) == 50
    assert {len(r.prompt) for r in requests if r.kind == "long"} == {300}
    assert all(5 <= len(r.prompt) <= 80 for r in requests if r.kind == "chat")


def test_lengths_are_lognormal_within_their_bounds() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw(Lengths(100, 0.5, 1, 10**6), rng) for _ in range(4000)]
    assert np.median(drawn) == pytest.approx(100, rel=0.05)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)
    assert {draw(Lengths(100, 3.0, 90, 110), rng) for _ in range(200)} >= {90, 110}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_fits_the_model_it_is_for_and_smaller_ones(name: str) -> None:
    scenario = SCENARIOS[name]  # type: ignore[index]
    assert scenario.name == name
    assert scenario.fitted(MODEL_LEN, 1.0) == scenario
    assert scenario.fitted(10 * MODEL_LEN, 1.0) == scenario
    small = scenario.fitted(1024, 1.0)
    assert small.most_tokens <= 1024
    assert small.kinds[0].prompt.median == pytest.approx(scenario.kinds[0].prompt.median / 8)
    with pytest.raises(ConfigError, match="length_scale 9"):
        SCENARIOS["long-prompts"].fitted(MODEL_LEN, 9.0)


def test_a_scenario_as_subject() -> None:
    case = made_up("long-prompts", MODEL_LEN // 2, 0.0, seed=0)
    assert case.length_factor == pytest.approx(0.5)
    assert [case.whole_decks(count) for count in (1, 13, 14)] == [13, 13, 26]
    longest = max(len(request.prompt) for request in case.workload.first(13))
    assert longest == 2048


ROWS = [
    TraceRow(0.0, 1024, 100, (0, 1)),
    TraceRow(1.0, 1200, 100, (0, 1, 2)),
    TraceRow(4.0, 600, 50, (0, 3)),
]


def test_equal_blocks_are_equal_tokens() -> None:
    workload = TraceWorkload(ROWS, 0.125, most_tokens=8192, seed=0)
    first, second, third = (request.prompt for request in workload.first(3))
    assert (len(first), len(second), len(third)) == (128, 150, 75)
    assert second[:128] == first
    assert third[:64] == first[:64]
    assert third[64:] != second[64:75]
    other_seed = TraceWorkload(ROWS, 0.125, most_tokens=8192, seed=1).first(1)[0].prompt
    assert other_seed != first


@pytest.mark.parametrize(
    "workload",
    [
        SyntheticWorkload(MIXED, 3),
        TraceWorkload(
            [TraceRow(0.1 * n, 40, 5, blocks=(7, 100 + n), block_tokens=16) for n in range(20)],
            1.0,
            most_tokens=8192,
            seed=0,
        ),
    ],
)
def test_other_contents_are_other_tokens_and_the_same_in_everything_else(
    workload: Workload,
) -> None:
    some, others, same = (workload.timed(5.0, 20, contents=number) for number in (0, 1, 1))
    assert others == same
    assert [replace(r, prompt=[]) for r in some] == [replace(r, prompt=[]) for r in others]
    for one, other in zip(some, others, strict=True):
        assert len(one.prompt) == len(other.prompt)
        assert one.prompt != other.prompt
    shared = [r.prompt[:16] == others[0].prompt[:16] for r in others]
    assert all(shared) == all(r.prompt[:16] == some[0].prompt[:16] for r in some)


def test_a_trace_keeps_its_rhythm_at_another_rate() -> None:
    workload = TraceWorkload(ROWS, 1.0, most_tokens=8192, seed=0)  # 0.5 requests a second
    assert [r.at_s for r in workload.timed(1.0, 10)] == pytest.approx([0.0, 0.5, 2.0])


def test_the_rate_is_that_of_the_part_of_a_trace_that_is_sent() -> None:
    rows = [TraceRow(at_s, 40, 2) for at_s in (0.0, 10.0, 20.0, 21.0, 22.0, 23.0)]  # load rises
    workload = TraceWorkload(rows, 1.0, most_tokens=8192, seed=0)
    assert [r.at_s for r in workload.timed(2.0, 3)] == pytest.approx([0.0, 0.5, 1.0])


def test_the_part_that_is_sent_may_have_no_rate() -> None:
    rows = [TraceRow(at_s, 40, 2) for at_s in (0.0, 0.0, 0.0, 21.0)]
    with pytest.raises(ConfigError, match="first 3 requests of the trace have no rate"):
        TraceWorkload(rows, 1.0, most_tokens=8192, seed=0).timed(2.0, 3)


def test_requests_that_are_too_long_are_cut_and_counted() -> None:
    workload = TraceWorkload(ROWS, 1.0, most_tokens=700, seed=0)
    lengths = [(len(request.prompt), request.num_output) for request in workload.first(3)]
    assert lengths == [(600, 100), (600, 100), (600, 50)]
    assert workload.num_cut == 2


def test_a_trace_without_blocks_shares_nothing() -> None:
    rows = [TraceRow(float(i), 40, 2) for i in range(5)]
    prompts = [tuple(r.prompt[:8]) for r in TraceWorkload(rows, 1.0, 8192, seed=0).first(5)]
    assert len(set(prompts)) == 5


def test_lengths_of_a_trace_are_scaled_by_its_99th_percentile() -> None:
    rows = [TraceRow(float(i), 900 if i else 10**6, 100) for i in range(200)]
    assert trace_factor(rows, 500) == pytest.approx(0.5)
    assert trace_factor(rows, 5000) == 1.0
    case = replayed("t", rows, 500, 0.0, seed=0)
    assert case.length_factor == 0.5
    assert case.num_cut == 1
