"""A node on standby waits for a pool, for SIGTERM or until it is sick, and then says so no more."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.node.standby import Standby
from pdserve.shared.errors import NodeSick
from pdserve.shared.process.signals import StopSignals
from tests.unit.node.test_engine_watch import running
from tests.waits import until


@pytest.mark.parametrize("end", ["role", "drain", "sick"])
async def test_it_waits_no_more_however_that_ends(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    async with running() as bench:
        signals = StopSignals()
        standby = Standby("n", lambda: heard.append(standby.is_waiting))
        waiting = asyncio.create_task(standby.wait(bench.watch, signals))
        await until(lambda: standby.is_waiting)
        if end == "role":
            standby.role_given()
        elif end == "drain":
            signals.drain.set()
        else:
            monkeypatch.setattr(type(bench.engine), "has_thread", False)
        async with asyncio.timeout(30):
            (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        assert not standby.is_waiting
        assert isinstance(ended, NodeSick) is (end == "sick")
    assert heard == [True]
