"""Who tries an exporter again that could not be reached."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pdserve.node.sessions.unreached import LONGEST_S, Unreached
from pdserve.shared.clock import ManualClock


def test_one_tries_it_again_after_ever_longer_pauses() -> None:
    clock = ManualClock(100.0)
    unreached = Unreached(clock, first_s=2.0)
    tried_s: list[float] = []
    assert not unreached.leaves_alone("life", is_tried=True), "nothing has failed yet"
    while len(tried_s) < 8:
        if not unreached.leaves_alone("life", is_tried=False):
            tried_s.append(clock.now())
            unreached.failed("life")
        clock.advance(0.25)
        if tried_s:
            assert unreached.leaves_alone("life", is_tried=True)
    pauses_s = [later - sooner for sooner, later in pairwise(tried_s)]
    assert pauses_s == pytest.approx([2, 4, 8, 16, 32, LONGEST_S, LONGEST_S], abs=0.25)
    unreached.reached("life")
    assert not unreached.leaves_alone("life", is_tried=True)


def test_of_lives_that_have_ended_nothing_is_kept() -> None:
    clock = ManualClock(100.0)
    unreached = Unreached(clock, first_s=2.0)
    for number in range(1000):
        unreached.failed(f"life {number}")
        clock.advance(1.0)
    assert len(unreached) <= 2 * LONGEST_S
