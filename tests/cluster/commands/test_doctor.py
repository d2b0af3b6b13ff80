"""`pdserve doctor --cluster` looks at a real cluster, which is well, and then is not."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from pdserve import __version__
from pdserve.commands.cli.doctor.cluster.command import diagnose
from pdserve.commands.cli.main import main
from pdserve.findings.finding import Finding, Level
from pdserve.node import runtime
from pdserve.settings.timeouts import Timeouts
from tests.cluster.client import Client
from tests.cluster.fleet import SETTLE_S, Fleet, fleet_config, poll, running
from tests.cluster.forked import ForkedChild
from tests.cluster.prompts import make_prompt

AHEAD_S = 7.0


def set_the_clock_wrong() -> None:
    """In the node's process: what it takes for the time."""
    wrong = SimpleNamespace(time=lambda: time.time() + AHEAD_S)
    runtime.time = wrong  # type: ignore[assignment]


class OddChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return set_the_clock_wrong if "--node-id=prefill-1" in words else None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """One of the prefill nodes has other transports than the others, and another time."""
    waits = {"heartbeat_s": Timeouts().heartbeat_s, "liveness_s": Timeouts().liveness_s}
    config = fleet_config(tiny_checkpoint, prefill=2, decode=1, timeouts=waits)
    async with running(Fleet(config, {"prefill-1": ["--transports=tcp"]}, OddChild)) as fleet:
        yield fleet


async def wait_for(fleet: Fleet, told: str) -> Finding:
    """The finding that tells this, as soon as there is one."""
    found: list[Finding] = []

    async def look() -> bool:
        found[:] = await diagnose([fleet.url])
        return any(told in finding.what for finding in found)

    await poll(look, SETTLE_S, lambda: f"{told!r} is not told: {[f.what for f in found]}")
    return next(finding for finding in found if told in finding.what)


async def test_a_cluster_that_serves_has_no_problem_and_its_slow_link_is_named(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    served_by: set[str | None] = set()
    async with Client(fleet.url) as client:
        while "prefill-1" not in served_by:  # calls that do not overlap all go to the other one
            calls = (client.complete(make_prompt(80 + i), 4) for i in range(8))
            served_by |= {output.prefill_node for output in await asyncio.gather(*calls)}
    told = "decode-0 pulls from prefill-1 by tcp and not by shm: not offered"
    assert (await wait_for(fleet, told)).level is Level.WARNING
    assert (await wait_for(fleet, "prefill-1 offers only tcp")).level is Level.WARNING
    assert await asyncio.to_thread(main, ["doctor", "--cluster", fleet.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok       pools         ready: 2 prefill and 1") for line in lines)
    assert any(f"pdserve {__version__}; 1 revision" in line for line in lines)
    (clock,) = (line for line in lines if "  clocks  " in line)
    assert re.search(r"^warning .* the clock of prefill-1 is [67]\.\d s ahead of the", clock)


async def test_a_node_that_is_killed_is_missed_until_it_is_back(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    await fleet.kill_node("prefill-0")
    found = await wait_for(fleet, "prefill-0 was lost")
    assert found.level is Level.PROBLEM
    assert "exit code" in found.advice
    assert await asyncio.to_thread(main, ["doctor", "--cluster", fleet.url]) == 1
    assert capsys.readouterr().out.startswith("problem ")
    await fleet.restore()
    await fleet.wait_back()
    assert not [f for f in await diagnose([fleet.url]) if f.level is Level.PROBLEM]


@pytest.mark.long
async def test_a_node_that_is_paused_leaves_its_pool_empty(fleet: Fleet) -> None:
    fleet.send_signal("decode-0", signal.SIGSTOP)
    try:
        missing = await wait_for(fleet, "no decode node is ready (none is attached)")
        assert missing.level is Level.PROBLEM
        assert (await wait_for(fleet, "decode-0 was lost")).level is Level.PROBLEM
    finally:
        fleet.send_signal("decode-0", signal.SIGCONT)
    await fleet.wait_back()
    await wait_for(fleet, "the event loop of decode-0 was late by")
    assert not [f for f in await diagnose([fleet.url]) if f.level is Level.PROBLEM]


async def test_a_coordinator_that_is_not_there_is_a_problem(fleet: Fleet) -> None:
    nobody = "http://127.0.0.1:1"
    found = await diagnose([fleet.url, nobody])
    assert found[0].level is Level.PROBLEM
    assert nobody in found[0].what
