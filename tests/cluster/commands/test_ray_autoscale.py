"""`pdserve up --on ray --autoscale`: nodes come and go, and Ray has their room back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from pdserve.settings.config import RoutingConfig
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.commands.ray_up import (
    STARTED_S,
    Machines,
    machine_of,
    machines,
    processes,
    serving,
)
from tests.cluster.fleet import fleet_config, poll

__all__ = ["machines"]  # a fixture
pytestmark = pytest.mark.timeout(900)


def _actors_of_nodes() -> int:
    """How many there are, of Ray's; the coordinator has one, too."""
    names = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return sum(name.startswith("ray::RayRunner") for name in names) - 1


async def test_a_cluster_that_sleeps_gives_its_machines_back_and_wakes_for_a_request(
    machines: Machines, tiny_checkpoint: Path
) -> None:
    sleepy = RoutingConfig(admission=False, sleep_after_s=0.5)
    config = fleet_config(tiny_checkpoint, on="ray", autoscale="0:1", routing=sleepy)
    async with serving(config) as (up, _, url), Client(url, STARTED_S) as client:
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
    config = fleet_config(tiny_checkpoint, on="ray", autoscale="1:3", routing=RoutingConfig())
    async with serving(config) as (up, _, url), Client(url, STARTED_S) as client:
        await up.told("prefill-1 is on standby")
        places = {machine_of(name) for name in ("prefill-0", "decode-0", "prefill-1")}
        assert places == set(machines.raylets)
        assert len((await client.complete(make_prompt(20), 4)).tokens) == 4
