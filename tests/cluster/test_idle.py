"""A cluster with nothing to do does next to nothing."""

from __future__ import annotations

import asyncio
import time

from pdserve.commands.cluster.plan import COORDINATOR
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, cpu_seconds

WATCHED_S = 3.0
MOST = 0.15  # of one core: each wake is dear on virtual machines that were idle


async def test_an_idle_cluster_uses_no_cpu(fleet: Fleet, client: Client) -> None:
    outputs = await asyncio.gather(*(client.complete(make_prompt(50, i), 20) for i in range(4)))
    assert all(output.tokens for output in outputs)
    await fleet.assert_baseline()
    pids = {name: fleet.pid(name) for name in (COORDINATOR, *fleet.node_names)}
    before, started_s = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    await asyncio.sleep(WATCHED_S)  # what is watched is the time itself
    watched_s = time.monotonic() - started_s
    shares = {n: (cpu_seconds(pid) - before[n]) / watched_s for n, pid in pids.items()}
    assert max(shares.values()) < MOST, shares
