"""What `pdserve up` does when a process ends, on real processes: each is soon back, as itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.restarts import Restarts
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config

BACK_S = 60.0  # until a process of this model has started, however busy the machine is
LIVENESS_S = 2 * BACK_S


@dataclass
class Kept:
    """A fleet that is kept running, and what is said of it."""

    fleet: Fleet
    said: asyncio.Queue[str] = field(default_factory=asyncio.Queue)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def kept(tiny_checkpoint: Path) -> AsyncIterator[Kept]:
    config = fleet_config(tiny_checkpoint, timeouts={"resume_s": 0.1, "liveness_s": LIVENESS_S})
    kept = Kept(Fleet(config, restarts=True))
    restarts = Restarts(kept.fleet, kept.said.put_nowait)
    try:
        await kept.fleet.spawn()
        await kept.fleet.wait_ready()
        running = asyncio.create_task(restarts.run())
        yield kept
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        await kept.fleet.kill()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("decode-0",), marks=pytest.mark.long),
        pytest.param((COORDINATOR,), marks=pytest.mark.long),
        (COORDINATOR, "prefill-0"),
    ],
)
async def test_it_is_back_under_its_name(kept: Kept, names: tuple[str, ...]) -> None:
    """Its id is free at once: members are silent for two minutes before they count as lost."""
    fleet, url = kept.fleet, kept.fleet.url
    pids = {name: fleet.pid(name) for name in names}
    for name in names:
        fleet.send_signal(name, signal.SIGKILL)
    async with asyncio.timeout(BACK_S):
        said = [await kept.said.get() for _ in range(2 * len(names))]
    for name, pid in pids.items():
        end, ready = (line for line in said if line.startswith(f"{name} "))
        assert end.startswith(f"{name} (pid {pid}) ended with signal SIGKILL; starting it again in")
        assert ready == f"{name} is ready again"
    assert all(fleet.is_running(name) and fleet.pid(name) != pids[name] for name in names)
    await fleet.wait_back()
    assert fleet.url == url
    async with Client(url) as client:
        assert len((await client.complete(make_prompt(40), 5)).tokens) == 5


async def test_streams_wait_for_the_only_node_of_their_pool_until_it_is_back(kept: Kept) -> None:
    """Far longer than `resume_s`: it is known that what is lost is started again."""
    fleet, prompt = kept.fleet, make_prompt(40, "waits")
    async with Client(fleet.url) as client:
        expected = (await client.complete(prompt, 200)).tokens
        streams = [Follower(client, prompt, 200) for _ in range(8)]
        for stream in streams:
            await stream.reached(2)
        fleet.send_signal("decode-0", signal.SIGKILL)
        ends = [await stream.end() for stream in streams]
    assert [end.tokens for end in ends] == [expected] * 8
    async with asyncio.timeout(BACK_S):
        assert (await kept.said.get()).startswith("decode-0 ")
        assert await kept.said.get() == "decode-0 is ready again"
