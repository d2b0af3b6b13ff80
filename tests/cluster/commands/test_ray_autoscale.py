"""`pdserve up --on ray --autoscale`: nodes come and go, and Ray has their room back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from pdserve.settings.config import RoutingConfig
from pdserve.settings.flags import as_flags
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.commands.ray_up import (
    STARTED_S,
    STOP_S,
    Machines,
    Up,
    machine_of,
    machines,
    processes,
)
from tests.cluster.fleet import fleet_config, poll

if find_spec("ray") is None:
    pytest.skip("the ray extra is not installed", allow_module_level=True)

__all__ = ["machines"]  # a fixture
pytestmark = pytest.mark.timeout(900)


@asynccontextmanager
async def _up(
    checkpoint: Path, autoscale: str, routing: RoutingConfig
) -> AsyncIterator[tuple[Up, str]]:
    up = Up()
    config = fleet_config(checkpoint, on="ray", autoscale=autoscale, routing=routing)
    child = up.start(*as_flags(replace(config, start_s=STARTED_S)))
    try:
        yield up, (await up.told(r"is served at (http\S+) ")).group(1)
        assert (await child.stop(STOP_S)).returncode == 0, "\n".join(up.lines)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.ended()


def _actors_of_nodes() -> int:
    """How many there are, of Ray's; the coordinator has one, too."""
    names = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return sum(name.startswith("ray::RayRunner") for name in names) - 1


async def test_a_cluster_that_sleeps_gives_its_machines_back_and_wakes_for_a_request(
    machines: Machines, tiny_checkpoint: Path
) -> None:
    sleepy = RoutingConfig(admission=False, sleep_after_s=0.5)
    async with _up(tiny_checkpoint, "0:1", sleepy) as (up, url), Client(url) as client:
        before = await client.complete(make_prompt(20), 4)

        async def gone() -> bool:
            return not processes("--node-id=") and not _actors_of_nodes()

        await poll(gone, STARTED_S, lambda: "\n".join(up.lines))
        answers = [asyncio.create_task(client.complete(make_prompt(20), 4)) for _ in range(3)]
        assert [(await answer).tokens for answer in answers] == [before.tokens] * 3
        await up.told("decode-0 is ready")


async def test_a_node_waits_on_standby_on_the_third_machine(
    machines: Machines, tiny_checkpoint: Path
) -> None:
    async with _up(tiny_checkpoint, "1:3", RoutingConfig()) as (up, url), Client(url) as client:
        await up.told("prefill-1 is on standby")
        places = {machine_of(name) for name in ("prefill-0", "decode-0", "prefill-1")}
        assert places == set(machines.raylets)
        assert len((await client.complete(make_prompt(20), 4)).tokens) == 4
