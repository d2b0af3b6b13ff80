"""Classes of equal priority share by recent service over weight."""

from __future__ import annotations

import pytest

from pdserve.clock import ManualClock
from pdserve.engine.fair_share import HALF_LIFE_S, LEAD, FairShare


def test_who_got_least_goes_first() -> None:
    shares = FairShare(ManualClock())
    shares.charge("a", 1.0, 2.0)
    shares.charge("b", 1.0, 1.0)
    assert shares.rank("new") < shares.rank("b") < shares.rank("a")


def test_twice_the_weight_is_charged_half() -> None:
    shares = FairShare(ManualClock())
    shares.charge("a", 2.0, 2.0)
    shares.charge("b", 1.0, 1.5)
    shares.charge("", 1.0, 0.0)  # so that neither of them is being served
    assert shares.rank("a") == 1.0
    assert shares.rank("b") == 1.5


def test_service_fades_and_the_order_stays() -> None:
    clock = ManualClock()
    shares = FairShare(clock)
    shares.charge("a", 1.0, 8.0)
    shares.charge("b", 1.0, 4.0)
    clock.advance(3 * HALF_LIFE_S)
    shares.charge("c", 1.0, 0.75)
    assert shares.rank("a") == pytest.approx(1.0)
    assert shares.rank("b") == pytest.approx(0.5)
    assert shares.rank("b") < shares.rank("c") < shares.rank("a")


def test_the_class_that_is_being_served_has_a_lead() -> None:
    shares = FairShare(ManualClock())
    shares.charge("a", 1.0, 10.0)
    shares.charge("b", 1.0, 10.0)
    num_turns = 0
    served = "b"
    for _ in range(1000):
        first = min(("a", "b"), key=shares.rank)
        num_turns += first != served
        served = first
        shares.charge(first, 1.0, 0.1)
    # A turn lasts until the class is ahead by a share of all that was served, not for a charge.
    assert 10 < num_turns < 0.1 * 1000
    difference = abs(shares.rank("a") - shares.rank("b"))
    assert difference < 3 * LEAD * 120
