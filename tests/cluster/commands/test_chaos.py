"""Streams while processes are killed, drained and cut off: the short form of `pdserve bench chaos`.

Each kind of fault has its turn at the calls of one seed. Nothing is timed, but for what hangs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from pdserve.commands.bench.chaos.config import ChaosConfig
from pdserve.commands.bench.chaos.histories import LOST
from pdserve.commands.bench.chaos.hosts import enter, obstacle, own_hosts
from pdserve.commands.bench.chaos.measurement import ChaosReport
from pdserve.commands.bench.chaos.run import measure
from tests.cluster.forked import HastyChild, fork_server
from tests.matrix import matrix

SHOWN = ["kill-decode", "kill-prefill", "kill-coordinator", "drain-and-kill", "flip", "cut"]
PARTED = ["part-coordinator", "part-nodes"]


@pytest.mark.parametrize("num_faults", matrix([2, 5], 1))
async def test_faults_lose_nothing(num_faults: int) -> None:
    config = ChaosConfig(faults=num_faults, seed=3, calls=4, pause_s=0.2, prefill=1)
    report = ChaosReport(seed=config.seed)
    await measure(config, SHOWN, report, make_child=HastyChild)
    assert len(report.faults) == config.faults
    assert len(report.calls) >= config.calls
    assert report.num(LOST) == 0, report.complaints
    assert not report.complaints


class ChildThere(HastyChild):
    """A forked process that goes where this thread was when it started it."""

    def _prepare(self, words: list[str]) -> Callable[[], None]:
        self._network = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        return partial(_move, f"/proc/{os.getpid()}/fd/{self._network}")

    def _finish(self) -> None:
        os.close(self._network)
        super()._finish()


def _move(network: str) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    enter(descriptor)
    os.close(descriptor)


@pytest.mark.long
async def test_hosts_that_lose_each_other_lose_nothing() -> None:
    if why := obstacle():
        pytest.skip(why)
    config = ChaosConfig(faults=2, seed=1, calls=4, pause_s=0.2)
    report = ChaosReport(seed=config.seed)
    fork_server()  # here: in a network of this test it would outlive the test
    with own_hosts(3) as hosts:
        await measure(config, PARTED, report, hosts, ChildThere)
    assert len(report.faults) == config.faults
    assert len(report.calls) > config.calls
    assert not report.complaints
