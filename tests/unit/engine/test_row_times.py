"""What steps of as many rows took corrects what the profile says of them."""

from __future__ import annotations

import pytest

from pdserve.engine.drafts.row_times import RowTimes
from pdserve.measured.perf_model import StepShape


def rows(number: int) -> StepShape:
    return StepShape(number, number, 0, 300 * number)


def profiled(shape: StepShape) -> float:
    """One cost a row, as fitted over all numbers of rows."""
    return 6.8 + 0.73 * shape.num_sampled


def true(shape: StepShape) -> float:
    """Of a large vocabulary: bound by memory up to five rows, by arithmetic behind them."""
    return 3.0 + max(5.0, 0.9 * shape.num_sampled)


def learnt(*seen: int, slowed: float = 1.0) -> RowTimes:
    times = RowTimes(profiled)
    for _ in range(60):
        for number in seen:
            times.observe(rows(number), slowed * true(rows(number)))
    return times


def test_before_any_step_it_is_the_profile() -> None:
    assert RowTimes(profiled).step_s(rows(4)) == profiled(rows(4))


@pytest.mark.parametrize("number", range(1, 7))
def test_rows_that_are_free_are_found_to_be(number: int) -> None:
    """Those between the numbers that were seen included; the profile is off by up to a third."""
    assert learnt(1, 3, 6).step_s(rows(number)) == pytest.approx(true(rows(number)), rel=0.05)


def test_behind_what_was_seen_the_profile_goes_on() -> None:
    times = learnt(6)
    assert times.step_s(rows(12)) / times.step_s(rows(6)) == pytest.approx(
        profiled(rows(12)) / profiled(rows(6))
    )


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    """Else what was slow once, when a neighbour computed, would never be tried again."""
    times = learnt(4)
    for _ in range(20):
        times.observe(rows(4), 2 * true(rows(4)))
    assert times.step_s(rows(4)) > 1.3 * profiled(rows(4))
    for _ in range(600):
        times.observe(rows(1), profiled(rows(1)))
    assert times.step_s(rows(4)) == pytest.approx(profiled(rows(4)), rel=0.05)


def test_one_pause_says_little() -> None:
    times = learnt(1, 4)
    before = times.step_s(rows(4))
    times.observe(rows(4), 100.0)
    assert times.step_s(rows(4)) < 1.2 * before
