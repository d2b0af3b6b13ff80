"""CPU time of everybody, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.commands.bench.cpu_time import busy_seconds

STAT = """cpu  900 90 90 9000 90 90 90 90 0 0
cpu0 100 10 20 5000 70 1 2 3 40 0
cpu1 400 0 0 4000 0 0 0 0 0 0
cpu10 7 0 0 4000 0 0 0
intr 1
"""


def test_busy_is_all_but_idle_and_waiting_on_the_cores_that_are_named(tmp_path: Path) -> None:
    """What a hypervisor took is among it; a guest's time is in that of its user already."""
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert busy_seconds({0}, stat) == pytest.approx(136 * tick_s)
    assert busy_seconds({0, 10}, stat) == pytest.approx(143 * tick_s)
    assert busy_seconds(os.sched_getaffinity(0)) > 0
