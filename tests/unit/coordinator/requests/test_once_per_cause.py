"""A cause is told once, and then from time to time how often it came."""

from __future__ import annotations

import logging

import pytest

from coordinator.requests.once_per_cause import AGAIN_S, MOST, OncePerCause
from pdserve.shared.clock import ManualClock


def test_a_cause_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    once = OncePerCause(logging.getLogger("test"), clock)
    for i in range(10):
        once.note("a", f"r{i}")
        once.note("b", f"s{i}")
    clock.advance(AGAIN_S)
    once.note("a", "r10")
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    here = "goes on elsewhere: "
    assert told == [here + "r0", here + "s0", here + "r10 (9 more like it)"]


def test_not_all_causes_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    once = OncePerCause(logging.getLogger("test"), ManualClock())
    for cause in (*range(MOST + 1), 0):
        once.note(cause, "r")
    assert len(caplog.records) == MOST + 2
