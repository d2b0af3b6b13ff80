"""What comes: forecasts of arrivals, and which of them counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.admission.arrivals import BIN_S, DAY_S, LEAD_S, MOST_CLASSES, Arrivals

HOUR_S = 3600.0


def feed(
    arrivals: Arrivals, rate: Callable[[float], float], from_s: float, until_s: float
) -> Arrivals:
    """Have requests come evenly at a rate that changes with time, in requests/s."""
    number, sent, now_s = 0.0, 0, from_s
    while now_s < until_s:
        number += rate(now_s) * BIN_S / 2
        for _ in range(int(number) - sent):
            arrivals.observe("chat", 0.5, now_s)
        sent = int(number)
        now_s += BIN_S / 2
        arrivals.look(now_s)
    return arrivals


def test_nothing_is_known_before_half_a_minute() -> None:
    arrivals = feed(Arrivals(), lambda now_s: 1.0, 0.0, 25.0)
    assert not arrivals.are_known
    assert feed(arrivals, lambda now_s: 1.0, 25.0, 60.0).are_known


def test_without_history_it_goes_on_as_in_the_last_half_minute() -> None:
    arrivals = feed(Arrivals(), lambda now_s: 1.0 if now_s < 300 else 4.0, 0.0, 340.0)
    assert arrivals.forecast(LEAD_S) == pytest.approx((4.0, 2.0), rel=0.05)
    assert arrivals.recent_rate(60.0) == pytest.approx(3.0, rel=0.1)


def test_a_line_that_went_on_for_long_is_continued() -> None:
    arrivals = feed(Arrivals(), lambda now_s: now_s / 100, 0.0, 1200.0)
    assert arrivals.forecast(300.0)[0] == pytest.approx(15.0, rel=0.05)
    assert arrivals.num_off["forecast"] < 0.3 * arrivals.num_off["last"]


def at_noon(now_s: float) -> float:
    """0.2 requests/s, and 3 in one hour of each day."""
    return 3.0 if 12 * HOUR_S <= now_s % DAY_S < 13 * HOUR_S else 0.2


def test_what_repeats_daily_is_forecast_from_the_second_day_on() -> None:
    arrivals = feed(Arrivals(), at_noon, 0.0, 12 * HOUR_S - 30)
    assert arrivals.forecast(LEAD_S)[0] == pytest.approx(0.2, abs=0.1), "nobody knows yet"
    feed(arrivals, at_noon, 12 * HOUR_S - 30, DAY_S + 12 * HOUR_S - 30)
    assert arrivals.forecast(0.0)[0] == pytest.approx(0.2, abs=0.1)
    assert arrivals.forecast(LEAD_S)[0] == pytest.approx(3.0, abs=0.2)
    feed(arrivals, at_noon, DAY_S + 12 * HOUR_S - 30, DAY_S + 13 * HOUR_S - 30)
    assert arrivals.forecast(LEAD_S)[0] == pytest.approx(0.2, abs=0.2)


def test_a_class_counts_for_the_tokens_and_the_kv_that_it_takes() -> None:
    """As many requests as before, but long ones come instead of chats."""
    arrivals = Arrivals()
    for number in range(8 * 240):
        at_s = number / 8
        is_long = int((number + 1) ** 2 / 16 / 480) > int(number**2 / 16 / 480)  # half by the end
        arrivals.observe("long" if is_long else "chat", 0.5, at_s, 4000 if is_long else 50, 50)
    arrivals.look(240.0)
    present = arrivals.recent_rate(60.0)
    assert arrivals.forecast(60.0)[0] == pytest.approx(present, rel=0.05), "of requests as many"
    grown = arrivals.growth(60.0, 60.0)
    same = Arrivals()
    for second in range(240):
        same.observe("chat", 0.5, float(second), 50, 50)
    same.look(240.0)
    assert same.growth(60.0, 60.0) == pytest.approx(1.0, abs=0.01)
    assert grown > 1.2, "their KV is 54 times that of a chat"
    unknown = feed(Arrivals(), lambda now_s: 1.0 if now_s < 300 else 4.0, 0.0, 340.0)
    assert unknown.growth(60.0, 60.0) == pytest.approx(4.0 / 3.0, rel=0.1), "by requests"


def test_a_silent_minute_is_a_rate_of_none() -> None:
    arrivals = feed(Arrivals(), lambda now_s: 1.0, 0.0, 300.0)
    arrivals.look(400.0)
    assert arrivals.forecast(0.0) == (0.0, 0.0)


def test_classes_are_counted_apart_and_are_bounded() -> None:
    arrivals = Arrivals()
    for number in range(100):
        for index in range(MOST_CLASSES + 9):
            arrivals.observe(f"class {index}", 0.25, number * 1.0)
    rate, busy = arrivals.forecast(0.0)
    assert rate == pytest.approx(MOST_CLASSES + 9, rel=0.02)
    assert busy == pytest.approx(rate / 4)
    assert len(arrivals._by_class) == MOST_CLASSES
