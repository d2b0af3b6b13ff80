"""`pdserve calibrate`: true costs are found in noisy steps, and neighbours in overlaps."""

from __future__ import annotations

import random
from itertools import chain

import msgspec
import pytest

from pdserve.commands.simulation.calibrate.drive import Idle
from pdserve.commands.simulation.calibrate.fit import Measured, calibrate
from pdserve.commands.simulation.calibrate.front_meter import FrontWork
from pdserve.commands.simulation.calibrate.residuals import Found
from pdserve.commands.simulation.calibrate.samples import Recording
from pdserve.commands.simulation.machine import Machine
from pdserve.kv import KvDtype
from pdserve.measured.calibration import ModelShape, NodeLimits
from pdserve.measured.perf_model import PerfModel, StepRow, StepShape
from pdserve.measured.samples import NodeKind, PullSample, StepSample
from pdserve.node.profiling.fit import fit_costs
from pdserve.protocol import StepCosts
from pdserve.shared.errors import CalibrationError

TRUE = StepCosts(knot_tokens=[1, 64, 512], knot_s=[0.005, 0.015, 0.1], pair_s=5e-8, context_s=4e-7)
KIND = NodeKind(
    device="a processor",
    device_type="cpu",
    cpus=1,
    host_cores=4,
    model="random-50m",
    shape=ModelShape(8, 512, 4, 64, 32000, KvDtype.BFLOAT16, 64, 100_000_000),
    limits=NodeLimits(2048, 512, 64, 8192),
    tensor_parallel=1,
    quantisation="",
)


def some_step(rng: random.Random, kind: str) -> StepShape:
    rows = []
    if kind != "prefill":
        context = rng.randint(10, 3000)
        rows = [StepRow(1, context, is_decoding=True) for _ in range(rng.choice([1, 4, 16, 64]))]
    if kind != "decode":
        rows.append(StepRow(rng.choice([16, 64, 200, 440]), rng.choice([0, 0, 700, 3000])))
    return StepShape.of(rows)


def recorded(seed: int, *, slower_beside: float, front_s: float = 0.0) -> Recording:
    """Two nodes of a host in turns: each alone, and then both at once.

    Beside each other, they also wait for `front_s` of what is in front of them.
    """
    rng, perf, now_s, number = random.Random(seed), PerfModel(TRUE), 100.0, 0
    recording = Recording(hosts={"a": "host", "b": "host", "far": "another host"})
    recording.steps = {"a": [], "b": [], "far": []}

    def stepped(node: str, kind: str, at_s: float, factor: float, more_s: float = 0.0) -> float:
        nonlocal number
        number += 1
        shape = some_step(rng, kind)
        period_s = perf.step_s(shape) * factor * rng.uniform(0.95, 1.05) + more_s
        recording.steps[node].append(
            StepSample(
                number,
                at_s + period_s,
                period_s,
                shape.num_tokens,
                shape.num_sampled,
                shape.prefill_pairs,
                shape.decode_context,
            )
        )
        return at_s + period_s

    for kind in ("prefill", "decode", "mixed"):
        for _ in range(200):
            stepped("far", "decode", now_s, 1.0)  # at the same time, but on another host
            now_s = stepped("a", kind, now_s, 1.0)
    until_s = now_s + 5.0
    for node in ("a", "b"):
        at_s = now_s
        while at_s < until_s:
            at_s = stepped(node, "decode", at_s, slower_beside, front_s)
    recording.pulls = [
        PullSample(number + n, "shm", size, (0.001 + size / 4e9) * rng.uniform(0.9, 1.1))
        for n, size in enumerate([1 << 16, 1 << 20, 1 << 25] * 20)
    ]
    return recording


def measured() -> Measured:
    perf, shape = PerfModel(TRUE), KIND.shape
    handed_off = [
        Idle(
            num_prompt=length,
            ttft_s=0.004 + perf.prefill_s(length, 0, 512),
            first_gap_s=0.005 + 0.003 + 0.001 + length * shape.layout.token_bytes / 4e9,
            later_gap_s=0.005,
        )
        for length in (10, 100, 500)
    ]
    return Measured(
        kind=KIND,
        fitted=recorded(1, slower_beside=1.5),
        held_out=recorded(2, slower_beside=1.5),
        handed_off=handed_off,
        prompt_lengths={1, 3440},
        contexts={7, 3446},
    )


def test_the_true_costs_are_found() -> None:
    found, true = calibrate(measured(), "2026-11-23", 0), PerfModel(TRUE)
    for costs, kind in (
        (found.prefill, "prefill"),
        (found.decode, "decode"),
        (found.mixed, "mixed"),
    ):
        rng, perf = random.Random(3), PerfModel(costs)
        for _ in range(50):
            shape = some_step(rng, kind)
            assert perf.step_s(shape) == pytest.approx(true.step_s(shape), rel=0.08), kind
    assert found.pull.transport == "shm"
    assert found.pull.fixed_s == pytest.approx(0.001, rel=0.1)
    assert found.pull.bytes_per_s == pytest.approx(4e9, rel=0.1)


def test_errors_and_residuals_are_those_of_the_noise() -> None:
    found = calibrate(measured(), "2026-11-23", 0)
    for error in (found.errors.prefill, found.errors.decode, found.errors.mixed):
        assert error is not None
        assert 0.01 < error < 0.05  # even noise of up to 5 % is 2.5 % on average
    for drawn in (found.residuals.prefill, found.residuals.decode, found.residuals.mixed):
        ratios = list(chain.from_iterable(drawn))
        assert 0.85 < min(ratios) < 0.97
        assert 1.03 < max(ratios) < 1.15


def test_slow_moments_stay_together() -> None:
    """For two of four seconds, all takes twice as long: in whole stretches, not in half of all."""
    steps, at_s = [], 0.0
    for number in range(4000):
        period_s = 0.01 * (1 + (at_s % 4 >= 2))
        at_s += period_s
        steps.append(StepSample(number, at_s, period_s, 1, 1, 0, 100))
    costs = StepCosts(knot_tokens=[1], knot_s=[0.01])
    stretches = Found.of(costs, steps).stretches(random.Random(0))
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    assert len(stretches) == 40
    assert sum(1.0 < mean < 2.0 for mean in means) <= 12  # it began or ended within
    assert 5 <= sum(mean == 2.0 for mean in means) <= 20
    assert all(20 <= len(stretch) <= 26 for stretch in stretches[:-1])


def test_costs_are_those_of_the_average_step_but_for_a_few_that_hung() -> None:
    rng = random.Random(4)
    samples = [
        (StepShape(1, 1, 0, 100), 0.01 * rng.choice([0.8, 0.8, 0.8, 1.6])) for _ in range(400)
    ]
    hung = [(StepShape(1, 1, 0, 100), 1.0)]
    typical = fit_costs(samples + hung).knot_s[0]
    average = fit_costs(samples + hung, of_means=True).knot_s[0]
    assert typical < average < 0.0105


def test_neighbours_of_a_host_are_told_apart_from_nodes_elsewhere() -> None:
    host = calibrate(measured(), "2026-11-23", 0).host
    assert host.decode_beside_decode == pytest.approx(1.5, rel=0.05)
    assert host.decode_beside_prompt == 1.0  # nobody has seen it
    assert host.cores == 4


def test_what_is_in_front_is_told_apart_from_the_bus() -> None:
    """With as many nodes as cores, all that it takes is taken from steps."""
    front = [
        FrontWork(3e-3 * requests + 9e-4 * steps + 2e-5 * tokens, requests, steps, tokens)
        for requests, steps, tokens in ((40, 300, 250), (160, 660, 5600), (110, 700, 1900))
    ]
    seen = measured()
    seen.front = front
    seen.kind = msgspec.structs.replace(KIND, host_cores=2)
    seen.fitted = recorded(1, slower_beside=1.2, front_s=9e-4 + 2e-5 * 21)  # a batch on average
    seen.held_out = recorded(2, slower_beside=1.2, front_s=9e-4 + 2e-5 * 21)
    host = calibrate(seen, "2026-11-26", 0).host
    assert host.front_request_s == pytest.approx(3e-3, rel=0.01)
    assert host.front_step_s == pytest.approx(9e-4, rel=0.01)
    assert host.front_token_s == pytest.approx(2e-5, rel=0.01)
    assert host.decode_beside_decode == pytest.approx(1.2, rel=0.05)
    seen.front = []
    assert calibrate(seen, "2026-11-26", 0).host.decode_beside_decode > 1.25


@pytest.mark.long
def test_nodes_are_simulated_with_what_they_believe() -> None:
    seen = measured()
    seen.held_out.believed = believed = StepCosts(knot_tokens=[1, 64], knot_s=[0.004, 0.02])
    found = calibrate(seen, "2026-11-26", 0)
    assert Machine.of(found).costs == believed
    assert Machine.of(found).step_costs["decode"] == found.decode
    seen.held_out.believed = None
    found = calibrate(seen, "2026-11-26", 0)
    assert Machine.of(found).costs == found.mixed


def test_what_messages_add_is_what_steps_and_pulls_leave() -> None:
    overheads = calibrate(measured(), "2026-11-23", 0).overheads
    assert overheads.first_token_s == pytest.approx(0.004, abs=0.003)
    assert overheads.handoff_s == pytest.approx(0.003, abs=0.0005)


def test_a_kind_that_was_not_seen_is_fitted_with_the_others_and_its_error_is_unknown() -> None:
    seen = measured()
    for recording in (seen.fitted, seen.held_out):
        for node, steps in recording.steps.items():
            recording.steps[node] = [s for s in steps if not (s.prefill_pairs and s.decode_context)]
    found, true = calibrate(seen, "2026-11-23", 0), PerfModel(TRUE)
    assert found.errors.mixed is None
    assert found.residuals.mixed == []
    shape = some_step(random.Random(5), "mixed")
    assert PerfModel(found.mixed).step_s(shape) == pytest.approx(true.step_s(shape), rel=0.15)


def test_ranges_are_what_was_sent() -> None:
    ranges = calibrate(measured(), "2026-11-23", 0).ranges
    assert (ranges.prompt_tokens.least, ranges.prompt_tokens.most) == (1, 3440)
    assert (ranges.batch.least, ranges.batch.most) == (1, 64)
    assert (ranges.context.least, ranges.context.most) == (7, 3446)


def test_a_cluster_that_was_busy_all_the_time_is_no_ground_for_a_calibration() -> None:
    seen = Measured(KIND, fitted=Recording({"a": []}, {"a": "host"}))
    with pytest.raises(CalibrationError, match="only 0 steps were measured without neighbours"):
        calibrate(seen, "2026-11-23", 0)
