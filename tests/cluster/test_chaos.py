"""Streams while processes are killed, drained and cut off: the short form of `pdserve bench chaos`.

Each kind of fault has its turn at the calls of one seed. Nothing is timed, but for what hangs.
"""

from __future__ import annotations

from pdserve.bench.chaos.config import ChaosConfig
from pdserve.bench.chaos.histories import LOST
from pdserve.bench.chaos.measurement import ChaosReport
from pdserve.bench.chaos.run import measure
from tests.cluster.forked import HastyChild

SHOWN = ["kill-decode", "kill-prefill", "kill-coordinator", "drain-and-kill", "flip", "cut"]


async def test_faults_lose_nothing() -> None:
    config = ChaosConfig(faults=5, seed=3, calls=6, pause_s=0.5)
    report = ChaosReport(seed=config.seed)
    await measure(config, SHOWN, report, HastyChild)
    assert len(report.faults) == config.faults
    assert len(report.calls) > config.calls
    assert report.num(LOST) == 0, report.complaints
    assert not report.complaints
