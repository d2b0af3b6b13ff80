"""Measuring how well predictions fit, with a machine that is known."""

from __future__ import annotations

import pytest

from pdserve.commands.bench.perf_model.measurement import (
    PHASES,
    HeldOut,
    Step,
    measure_held_out,
    phase_errors,
)
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts

COSTS = StepCosts(
    knot_tokens=[1, 512],
    knot_s=[0.001, 0.016],
    sampled_s=1e-5,
    pair_s=4e-8,
    context_s=1e-7,
)


def held_out(max_batch_size: int = 64) -> HeldOut:
    return HeldOut(512, max_batch_size, 2048, allow=lambda step: len(step) <= max_batch_size)


def seconds(step: Step) -> float:
    return PerfModel(COSTS).step_s(StepShape.of(step))


def test_a_model_that_fits_has_no_errors() -> None:
    perf = PerfModel(COSTS)
    measured = measure_held_out(held_out(), seconds, perf, num_steps=20, repeats=2, seed=1)
    errors = phase_errors(measured, PerfModel(COSTS), perf)
    assert [error.phase for error in errors] == list(PHASES)
    assert all(error.steps == 20 for error in errors)
    assert all(error.mape < 1e-9 and error.corrected_mape < 1e-9 for error in errors)
    for error in errors:
        assert all(
            (worst.decode_context > 0) == (error.phase != "prefill") for worst in error.worst
        )
        assert all((worst.prefill_pairs > 0) == (error.phase != "decode") for worst in error.worst)


def test_a_machine_that_is_slower_by_a_factor_is_seen_and_corrected() -> None:
    perf = PerfModel(COSTS)
    measured = measure_held_out(
        held_out(), lambda step: 1.25 * seconds(step), perf, num_steps=20, repeats=5, seed=1
    )
    for error in phase_errors(measured, PerfModel(COSTS), perf):
        assert error.mape == pytest.approx(0.2)
        assert error.p90 == pytest.approx(0.2)
        assert error.bias == pytest.approx(-0.2)
        assert error.corrected_mape < 0.01


def test_a_phase_that_cannot_be_is_left_out() -> None:
    perf = PerfModel(COSTS)
    measured = measure_held_out(held_out(1), seconds, perf, num_steps=3, repeats=1, seed=1)
    phases = [error.phase for error in phase_errors(measured, perf, perf)]
    assert phases == ["prefill", "decode"]
