"""Where attainment crosses the target, and which rates are worth measuring to find it."""

from __future__ import annotations

from math import inf

import pytest

from pdserve.commands.bench.compare.goodput import RatePoint, crossing, goodput, merged
from pdserve.commands.bench.compare.rates import next_rate
from pdserve.commands.bench.compare.shown.verdict import dispersion


def points(*pairs: tuple[float, float], sent: int = 1000) -> list[RatePoint]:
    return [RatePoint(rate, {"": (round(share * sent), sent)}) for rate, share in pairs]


def test_the_crossing_is_linear_between_the_rates_around_it() -> None:
    falling = points((1, 1.0), (2, 0.95), (4, 0.85))
    assert crossing(falling, 0.9) == (pytest.approx(3.0), "crossing")
    assert crossing(points((1, 0.9), (2, 0.8)), 0.9) == (pytest.approx(1.0), "crossing")


def test_what_is_kept_at_a_higher_rate_is_kept_at_a_lower_one() -> None:
    """Of shares that rise, the mean counts, by their requests."""
    rate, _ = crossing(points((1, 1.0), (2, 0.9), (3, 0.98), (4, 0.5)), 0.9)
    assert rate == pytest.approx(3 + 0.04 / 0.44)
    few, many = points((2, 0.8), sent=10), points((1, 1.0), (3, 1.0), (4, 0.8), sent=1000)
    assert crossing([*few, *many], 0.9)[0] == pytest.approx(3.5, abs=0.01)


def test_the_kind_that_falls_first_decides() -> None:
    two = [RatePoint(1, {"a": (10, 10), "b": (10, 10)}), RatePoint(2, {"a": (8, 10), "b": (6, 10)})]
    assert crossing(two, 0.9) == (pytest.approx(1.25), "crossing")


def test_a_target_that_is_always_or_never_met() -> None:
    assert crossing(points((1, 1.0), (2, 0.9)), 0.9) == (2, "above the rates")
    assert crossing(points((1, 0.8), (2, 0.95)), 0.9) == (0.0, "below the rates")


def test_goodput_sorts_its_points_and_has_an_interval() -> None:
    found = goodput(points((4, 0.8), (1, 1.0), (2, 1.0), sent=50), 0.9, seed=0)
    assert (found.rate, found.where) == (pytest.approx(3.0), "crossing")
    assert found.high is not None
    assert 2 < found.low < 3.0 < found.high < 4
    assert found == goodput(points((1, 1.0), (2, 1.0), (4, 0.8), sent=50), 0.9, seed=0)
    surer = goodput(points((1, 1.0), (2, 1.0), (4, 0.8), sent=5000), 0.9, seed=0)
    assert surer.high is not None
    assert surer.high - surer.low < (found.high - found.low) / 4


def test_a_few_requests_in_time_are_no_certainty() -> None:
    few, many = (goodput(points((1, 1.0), (2, 0.0), sent=sent), 0.9, 0) for sent in (4, 100))
    assert few.low == 0.0  # four of four: goodput may be below the lowest rate
    assert few.rate == many.rate == pytest.approx(1.1)
    assert many.low > 1.0


def test_every_kind_has_its_part_in_the_interval() -> None:
    chats_decide = [
        RatePoint(1, {"chat": (96, 100), "long": (4, 4)}),
        RatePoint(2, {"chat": (10, 100), "long": (4, 4)}),
    ]
    assert goodput(chats_decide, 0.9, 0).low == 0.0  # four long prompts say little
    alone = [RatePoint(1, {"chat": (96, 100)}), RatePoint(2, {"chat": (10, 100)})]
    assert goodput(alone, 0.9, 0).low > 1.0


def test_an_interval_has_no_end_beyond_the_rates() -> None:
    met = goodput(points((1, 1.0), (2, 1.0), sent=500), 0.9, seed=0)
    assert (met.low, met.high) == (2.0, None)
    missed = goodput(points((1, 0.1), (2, 0.0), sent=500), 0.9, seed=0)
    assert (missed.low, missed.high) == (0.0, 1.0)


def test_low_rates_that_were_kept_add_no_doubt() -> None:
    kept = [RatePoint(rate, {"chat": (49, 49), "long": (5, 5)}) for rate in range(1, 6)]
    found = goodput([*kept, RatePoint(6, {"chat": (20, 49), "long": (2, 5)})], 0.9, seed=0)
    assert found.high is not None
    assert 1 < found.low <= found.rate <= found.high < 6  # of five alone one may not know even this
    assert goodput(kept[-1:], 0.9, seed=0).low == 0.0


def climb(goodput: float, start: float, takes: float = inf, most: int = 20) -> list[float]:
    """The rates for a server that meets nearly everything up to its goodput, then nothing."""
    rates: list[float] = []
    while len(rates) < most:
        curve = points(*((rate, 0.95 * (rate <= goodput)) for rate in rates))
        rate = next_rate(curve, start, takes, 0.9, is_certain=True)
        if rate is None:
            break
        rates.append(rate)
    return rates


def test_rates_double_until_one_is_late_and_then_close_in() -> None:
    assert climb(9.0, start=1.0) == pytest.approx([1, 2, 4, 8, 16, 8 * 2**0.5, 8 * 2**0.25])
    assert climb(1e4, start=1.0)[-1] == pytest.approx(1e4, rel=0.2), "however far it is"


def test_who_fails_at_the_first_rate_is_looked_for_below_it() -> None:
    assert climb(0.4, start=1.0) == pytest.approx([1, 0.5, 0.25, 0.5**1.5, 0.5**1.25])


def test_rates_that_a_server_could_not_take_are_left_out_on_the_way_down() -> None:
    assert climb(0.2, start=8.0, takes=0.3) == pytest.approx(
        [8, 0.25, 0.125, 0.177, 0.21], rel=0.01
    )
    assert climb(2.0, start=8.0, takes=0.3)[:3] == [8, 0.25, 2**0.5], "it takes more"


def test_who_never_serves_anything_does_not_take_all_the_time() -> None:
    assert len(climb(0.0, start=1.0)) == 6


def test_an_uncertain_crossing_is_measured_again_where_there_were_fewer_requests() -> None:
    curve = [RatePoint(1.0, {"": (10, 10)}), RatePoint(1.05, {"": (8, 10)})]
    assert next_rate([], 3.0, 3.0, 0.9, is_certain=False) == 3.0
    assert next_rate(curve, 3.0, 3.0, 0.9, is_certain=False) in (1.0, 1.05)
    more = [*curve, RatePoint(1.0, {"": (90, 90)})]
    assert next_rate(more, 3.0, 3.0, 0.9, is_certain=False) == 1.05
    assert next_rate(more, 3.0, 3.0, 0.9, is_certain=True) is None


def test_runs_need_not_have_the_same_kinds_of_requests() -> None:
    """A class that is rare in a trace is in some of its runs only."""
    runs = [
        RatePoint(1.0, {"batch": (1, 2), "chat": (50, 50)}),
        RatePoint(1.0, {"chat": (40, 50), "rare": (1, 1)}),
    ]
    (point,) = merged(runs)
    assert point.kinds == {"batch": (1, 2), "chat": (90, 100), "rare": (1, 1)}
    assert min(dispersion([runs]).values()) >= 1
    assert goodput(runs, 0.9, seed=0).where == "below the rates"
