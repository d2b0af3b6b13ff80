"""What faults of `pdserve bench chaos` have done is undone, however they end."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from pdserve.commands.bench.chaos.adapters import ChaosAdapters
from pdserve.commands.bench.chaos.faults import FAULTS, FaultTarget
from pdserve.commands.bench.chaos.hosts import Hosts
from pdserve.commands.bench.chaos.relay import Relay
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.supervisor import Cluster

NODES = ["prefill-0", "decode-0"]


class SlowHosts:
    """Three hosts, of which some are slow."""

    def __init__(self) -> None:
        self.slow: set[int] = set()
        self.slow_down, self.speed_up = self.slow.add, self.slow.remove

    def __len__(self) -> int:
        return 3


@dataclass
class Site:
    """A cluster whose every name is one real process."""

    process: subprocess.Popen[bytes]
    relay: Relay
    hosts: SlowHosts

    @property
    def target(self) -> FaultTarget:
        cluster = SimpleNamespace(
            node_names=NODES,
            is_running=lambda name: name in (*NODES, COORDINATOR),
            pid=lambda name: self.process.pid,
            send_signal=lambda name, number: self.process.send_signal(number),
        )
        return FaultTarget(
            cast("Cluster", cluster),
            {"decode-0": self.relay},
            cast("Hosts", self.hosts),
            cast("aiohttp.ClientSession", None),
            Random(0),
            cast("ChaosAdapters", None),
        )

    def state(self) -> object:
        """All that faults may change."""
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return (
            status.rpartition(")")[2].split()[0] == "T",  # it is stopped
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE),
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE),
            (self.relay.delay_s, self.relay.lost_share, self.relay._passes.is_set()),
            set(self.hosts.slow),
        )


@pytest.fixture
def site() -> Iterator[Site]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield Site(process, Relay(lambda: "127.0.0.1:1"), SlowHosts())
        process.send_signal(signal.SIGCONT)
        process.kill()


async def until(is_so: Callable[[], bool]) -> None:
    """A process is stopped, or goes on, a moment after its signal."""
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "kind",
    [
        "freeze-decode",
        "freeze-prefill",
        "freeze-coordinator",
        "stutter",
        "swallow",
        "slow-link",
        "lossy-link",
        "slow-host",
        "full-disk",
        "no-descriptors",
    ],
)
async def test_a_fault_that_is_interrupted_is_undone(site: Site, kind: str) -> None:
    """By Ctrl-C, or because something else has failed: both cancel it."""
    before = site.state()
    fault = asyncio.ensure_future(FAULTS[kind](site.target))
    await until(lambda: site.state() != before)
    fault.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fault
    await until(lambda: site.state() == before)


async def test_a_process_that_has_ended_meanwhile_has_no_limit_left(site: Site) -> None:
    before = site.state()
    fault = asyncio.ensure_future(FAULTS["full-disk"](site.target))
    await until(lambda: site.state() != before)
    site.process.kill()
    site.process.wait()
    fault.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fault
