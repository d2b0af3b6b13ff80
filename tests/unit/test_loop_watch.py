"""A loop that stands still is seen in the metrics, and the log says where it stood."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from pdserve.metrics import CoordinatorMetrics, NodeMetrics
from pdserve.shared.process.loop_watch import STALL_S, LoopWatch, core_wait_s

LAG = "pdserve_event_loop_lag_seconds"


def hold_up_the_loop(is_over: Callable[[], bool]) -> None:
    """Python code that does not let the loop run."""
    deadline_s = time.monotonic() + 10
    while not is_over() and time.monotonic() < deadline_s:
        pass


def lag_in(metrics: CoordinatorMetrics | NodeMetrics) -> float:
    (line,) = [x for x in metrics.exposition().decode().splitlines() if x.startswith(f"{LAG} ")]
    return float(line.split()[1])


@pytest.mark.parametrize("make_metrics", [CoordinatorMetrics, NodeMetrics])
def test_a_loop_that_stands_still_is_measured_and_its_stack_is_logged(
    make_metrics: type[CoordinatorMetrics] | type[NodeMetrics], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="pdserve.shared.process.loop_watch")
    metrics = make_metrics()

    async def run() -> float:
        with LoopWatch() as watch:
            metrics.watch_loop(watch)
            begun_s = time.monotonic()
            hold_up_the_loop(lambda: "hold_up_the_loop" in caplog.text)
            stood_s = time.monotonic() - begun_s
            now_s = lag_in(metrics)
            await asyncio.sleep(0.05)
            assert lag_in(metrics) >= now_s, "it is remembered"
        return stood_s

    stood_s = uvloop.run(run())
    assert "hold_up_the_loop" in caplog.text
    assert lag_in(metrics) >= STALL_S
    assert lag_in(metrics) <= stood_s + 10.0


@pytest.mark.parametrize("has_core", [True, False])
def test_a_loop_that_only_had_no_core_is_told_apart(
    caplog: pytest.LogCaptureFixture, *, has_core: bool
) -> None:
    assert core_wait_s(threading.get_native_id()) >= 0

    async def run() -> None:
        with LoopWatch(lambda _: 0.0 if has_core else time.monotonic()):
            hold_up_the_loop(lambda: bool(caplog.records))

    asyncio.run(run())
    assert ("the host gave it no core" in caplog.text) is not has_core


def test_a_loop_in_time_logs_nothing_and_the_watch_ends_with_its_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> list[threading.Thread]:
        with LoopWatch() as watch:
            await asyncio.sleep(0.2)
            assert watch.longest_lag_s() < 10
            names = [thread.name for thread in threading.enumerate()]
            assert "loop-watch" in names
        return [thread for thread in threading.enumerate() if thread.name == "loop-watch"]

    assert asyncio.run(run()) == []
    stuck = [r for r in caplog.records if "hold_up_the_loop" in r.getMessage()]
    assert stuck == []


def test_an_error_inside_leaves_no_thread_behind() -> None:
    async def run() -> None:
        with LoopWatch():
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        asyncio.run(run())
    assert "loop-watch" not in [thread.name for thread in threading.enumerate()]
