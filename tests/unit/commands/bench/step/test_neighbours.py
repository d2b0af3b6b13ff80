"""Busy neighbours: what they are told, how they end, and what is made of what they take."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.commands.bench.step.cases import StepCase
from pdserve.commands.bench.step.measurement import LEAST_ROUNDS, observe
from pdserve.commands.bench.step.neighbours import BusyProcesses, Rounds
from pdserve.shared.errors import ClusterError
from tests.matrix import matrix
from tests.unit.commands.bench.step.test_floor import tiny, work_of
from tests.unit.commands.bench.step.test_step import FakeBench

CORES = sorted(os.sched_getaffinity(0))


class FakeNeighbours:
    """While they are busy, steps take half as long again, and half a core is lost."""

    def __init__(self, bench: FakeBench) -> None:
        self._bench = bench

    @contextmanager
    def busy(self) -> Iterator[Callable[[], float]]:
        self._bench.log.append("busy")
        self._bench.slowness = 1.5
        yield lambda: self._bench.now_s / 2
        self._bench.slowness = 1.0
        self._bench.log.append("rest")


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


def test_each_case_is_measured_alone_and_beside_neighbours_in_turns() -> None:
    bench = FakeBench()
    cases = [StepCase("decode", 2, 8)]
    work = work_of(tiny())
    (seen,) = observe(cases, work, bench, 0.0, bench.now, FakeNeighbours(bench))
    turn = ["read", "product", "step 2", "busy", "step 2", "rest"]
    assert bench.log == ["step 2", *turn * LEAST_ROUNDS]
    assert [time.total_s for time in seen.times] == [2.0] * LEAST_ROUNDS
    result = seen.rounds.result(num_threads=2, num_cores=2)
    assert (result.alone_ms, result.beside_ms, result.lost_cores) == (2000.0, 3000.0, 0.5)
    assert result.ratio == pytest.approx(1.5 / (2 / 1.5))


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "explained"),
    [(1, 1, 2.0), (2, 2, 4 / 3), (1, 2, 1.0), (4, 2, 4 / 3), (3, 4, 1.0)],
)
def test_only_cores_that_were_needed_explain_anything(
    num_threads: int, num_cores: int, explained: float
) -> None:
    rounds = Rounds(alone_s=[1.0], beside_s=[3.0], elapsed_s=10.0, lost_s=5.0)
    assert rounds.result(num_threads, num_cores).ratio == pytest.approx(3.0 / explained)


def test_one_round_with_a_pause_decides_nothing() -> None:
    rounds = Rounds(alone_s=[1.0, 1.0, 9.0], beside_s=[2.0, 2.0, 90.0], elapsed_s=9.0, lost_s=0.0)
    assert rounds.result(2, 2).ratio == 2.0


def test_they_use_a_core_when_told_to_and_at_no_other_time() -> None:
    before = children()
    with BusyProcesses(1, CORES) as neighbours:
        (pid,) = neighbours.pids
        assert os.sched_getaffinity(pid) == {CORES[-1]}
        with neighbours.busy() as used_s:
            begun_s = used_s()
            while used_s() < begun_s + 0.03:
                os.sched_yield()
        rested_s = used_s()
        threading.Event().wait(0.1)  # nothing happens, for several bursts
        assert used_s() == rested_s
    assert children() == before


def test_one_that_has_ended_is_missed() -> None:
    before = children()
    with BusyProcesses(2, CORES) as neighbours:
        os.kill(neighbours.pids[0], signal.SIGKILL)
        with pytest.raises(ClusterError, match="does not answer"), neighbours.busy():
            pytest.fail("began without them")
    assert children() == before


@pytest.mark.parametrize("end", matrix([signal.SIGINT, signal.SIGKILL], 1))
def test_they_do_not_outlive_who_started_them(end: signal.Signals) -> None:
    script = (
        "import signal, sys\n"
        "from pdserve.commands.bench.step.neighbours import BusyProcesses\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with BusyProcesses(1, [int(sys.argv[1])]) as neighbours, neighbours.busy():\n"
        "    print(neighbours.pids[0], flush=True)\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, "-c", script, str(CORES[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        neighbour = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(end)
        process.wait(30)
    try:
        assert wait_for_end(neighbour, 30.0)
    finally:
        os.close(neighbour)


def wait_for_end(pidfd: int, most_s: float) -> bool:
    return bool(select.select([pidfd], [], [], most_s)[0])
