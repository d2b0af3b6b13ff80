"""The kinds of faults. Each begins, lasts, and ends by itself; nodes that end are started again.

What is done to a process or a network is undone however a fault ends, by Ctrl-C too.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, permutations
from random import Random
from typing import Final

import aiohttp

from pdserve.commands.bench.chaos.adapters import ChaosAdapters
from pdserve.commands.bench.chaos.hosts import Hosts
from pdserve.commands.bench.chaos.relay import Relay
from pdserve.commands.bench.chaos.site import host_of
from pdserve.commands.bench.chaos.stopped_thread import find_thread, stopped
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.config import ONE_POOL, Mode
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.thread_name import ENGINE_THREAD

KILL_COORDINATOR: Final = "kill-coordinator"  # which ends calls that have no key
FULL_DISK: Final = "full-disk"
NO_DESCRIPTORS: Final = "no-descriptors"
STOP_ENGINE: Final = "stop-engine"
KILL_LOADING: Final = "kill-loading"  # of an adapter
_STOPPED_S: Final = 12.0  # a node takes 5 s to call itself stuck, while it has a core
_LIMITED_S: Final = 3.0
_SLOW_S: Final = 0.1
_LOADS_S: Final = 0.1  # an adapter
_LOST_SHARE: Final = 0.5
_STARTS_S: Final = 60.0  # a coordinator
_LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """What faults happen to."""

    cluster: Cluster
    relays: Mapping[str, Relay]  # by node
    hosts: Hosts | None  # of the nodes, the coordinator's first; None: all are on this machine
    session: aiohttp.ClientSession
    random: Random
    adapters: ChaosAdapters
    lasts_s: float = 3.0  # how long most faults do; longer than `liveness_s`

    def node(self, role: str = "") -> str:
        """A running node: of a pool, or of any."""
        names = [n for n in self.cluster.node_names if n.startswith(role)]
        running = [name for name in names if self.cluster.is_running(name)]
        return self.random.choice(running or names)

    def on_host(self, host: int) -> list[str]:
        """The nodes there."""
        assert self.hosts is not None
        return [name for name in self.cluster.node_names if host_of(name, self.hosts) == host]

    def some_hosts(self, number: int, *, of_nodes: bool = False) -> list[int]:
        """Different hosts, in any order; `of_nodes`: not the coordinator's."""
        assert self.hosts is not None
        return self.random.sample(range(1 if of_nodes else 0, len(self.hosts)), number)

    async def parted(self, *ways: tuple[int, int]) -> str:
        """Have what hosts send to others be lost for a while; returns the nodes there."""
        assert self.hosts is not None
        with ExitStack() as stack:  # each way is found again, whatever becomes of others
            for way in ways:
                stack.callback(self.hosts.find, *way)
                self.hosts.lose(*way)
            await asyncio.sleep(self.lasts_s)
        return " ".join(name for host in sorted({*chain(*ways)}) for name in self.on_host(host))

    def kill(self, name: str) -> None:
        """kill -9."""
        if self.cluster.is_running(name):
            self.cluster.send_signal(name, signal.SIGKILL)

    async def frozen(self, name: str, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.cluster.send_signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            self.cluster.send_signal(name, signal.SIGCONT)

    async def limited(self, name: str, limit: int, number: int) -> None:
        """Set a limit of the kernel on a process (`resource.RLIMIT_*`) for a while."""
        pid = self.cluster.pid(name)
        former = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (number, former[1]))
        try:
            await asyncio.sleep(_LIMITED_S)
        finally:
            with suppress(ProcessLookupError):  # it has ended, and its limit with it
                resource.prlimit(pid, limit, former)


Fault = Callable[[FaultTarget], Awaitable[str]]
"""Carries a fault out, until it is over; returns which process it hit."""


async def _kill(target: FaultTarget, role: str) -> str:
    name = target.node(role)
    target.kill(name)
    return name


async def _kill_loading(target: FaultTarget) -> str:
    """A node dies while adapters leave and come."""
    name = target.node()

    async def kill() -> None:
        await asyncio.sleep(target.random.uniform(0.0, _LOADS_S))
        target.kill(name)

    await target.adapters.reload(kill)
    return name


async def _kill_pool(target: FaultTarget) -> str:
    names = [name for name in target.cluster.node_names if name.startswith("decode")]
    for name in names:
        target.kill(name)
    return " ".join(names)


async def _kill_pair(target: FaultTarget) -> str:
    names = [target.node("prefill"), target.node("decode")]
    for name in names:
        target.kill(name)
    return " ".join(names)


async def _drain(target: FaultTarget, role: str) -> str:
    name = target.node(role)
    if target.cluster.is_running(name):
        target.cluster.send_signal(name, signal.SIGTERM)
    return name


async def _kill_while_draining(target: FaultTarget) -> str:
    """The node that streams move to dies."""
    names = [name for name in target.cluster.node_names if name.startswith("decode")]
    first, *others = target.random.sample(names, len(names))
    if target.cluster.is_running(first):
        target.cluster.send_signal(first, signal.SIGTERM)
    await asyncio.sleep(target.random.uniform(0.0, 0.2))
    for name in others:
        target.kill(name)
    return " ".join(names)


async def _freeze(target: FaultTarget, role: str) -> str:
    name = target.node(role)
    await target.frozen(name, target.lasts_s)
    return name


async def _stop_engine(target: FaultTarget) -> str:
    """The thread that computes steps stands still, and nothing else of the node."""
    name = target.node()
    if target.cluster.is_running(name):
        thread = find_thread(target.cluster.pid(name), ENGINE_THREAD)
        if thread is not None:  # else it starts, or ends
            await stopped(thread, _STOPPED_S)
    return name


async def _freeze_coordinator(target: FaultTarget) -> str:
    await target.frozen(COORDINATOR, target.lasts_s)
    return COORDINATOR


async def _kill_coordinator(target: FaultTarget) -> str:
    """It is started again at once; calls with a key go on, and so do the nodes."""
    await target.cluster.kill_node(COORDINATOR)
    async with asyncio.timeout(_STARTS_S):
        while True:
            with suppress(ClusterError):
                await target.cluster.status()
                break
            await asyncio.sleep(_LOOK_S)
    return COORDINATOR


async def _stutter(target: FaultTarget) -> str:
    name = target.node()
    await target.frozen(name, 0.5)
    return name


async def _flip(target: FaultTarget) -> str:
    """A node changes pools, and back."""
    name = target.node("decode")
    for role in ("prefill", "decode"):
        body = {"node": name, "role": role, "force": False, "timeout_s": 2.0}
        async with target.session.post(target.cluster.url + "/admin/role", json=body) as response:
            await response.read()
        await asyncio.sleep(0.5)
    return name


async def _cut(target: FaultTarget) -> str:
    name = target.random.choice(sorted(target.relays))
    target.relays[name].cut()
    return name


async def _swallow(target: FaultTarget) -> str:
    """Half-open: nothing passes, and no connection breaks."""
    name = target.random.choice(sorted(target.relays))
    relay = target.relays[name]
    relay.swallow(True)
    try:
        await asyncio.sleep(target.lasts_s)
    finally:
        relay.cut()
        relay.swallow(False)
    return name


async def _slow_link(target: FaultTarget) -> str:
    name = target.random.choice(sorted(target.relays))
    target.relays[name].delay_s = _SLOW_S
    try:
        await asyncio.sleep(target.lasts_s)
    finally:
        target.relays[name].delay_s = 0.0
    return name


async def _lossy_link(target: FaultTarget) -> str:
    """What TCP makes of lost packets: some are late, and with them all behind them."""
    name = target.random.choice(sorted(target.relays))
    target.relays[name].lost_share = _LOST_SHARE
    try:
        await asyncio.sleep(target.lasts_s)
    finally:
        target.relays[name].lost_share = 0.0
    return name


async def _part_coordinator(target: FaultTarget) -> str:
    """A host and the coordinator's hear nothing of each other."""
    (host,) = target.some_hosts(1, of_nodes=True)
    return await target.parted((0, host), (host, 0))


async def _part_nodes(target: FaultTarget) -> str:
    """Nodes of two hosts hear nothing of each other, and the coordinator of all of them."""
    first, second = target.some_hosts(2, of_nodes=True)
    return await target.parted((first, second), (second, first))


async def _part_host(target: FaultTarget) -> str:
    """Nobody hears anything of a host, nor it of them."""
    assert target.hosts is not None
    (host,) = target.some_hosts(1, of_nodes=True)
    return await target.parted(
        *(way for way in permutations(range(len(target.hosts)), 2) if host in way)
    )


async def _part_one_way(target: FaultTarget) -> str:
    """Of two hosts, one hears the other, which does not hear it."""
    sender, receiver = target.some_hosts(2)
    return await target.parted((sender, receiver))


async def _slow_host(target: FaultTarget) -> str:
    """A host can send little for a while: what waits to be sent is late, and some of it lost."""
    assert target.hosts is not None
    (host,) = target.some_hosts(1, of_nodes=True)
    target.hosts.slow_down(host)
    try:
        await asyncio.sleep(target.lasts_s)
    finally:
        target.hosts.speed_up(host)
    return " ".join(target.on_host(host))


async def _full_disk(target: FaultTarget) -> str:
    """The coordinator cannot write another byte to any file: a store that says so is used again."""
    await target.limited(COORDINATOR, resource.RLIMIT_FSIZE, 0)
    return COORDINATOR


async def _no_descriptors(target: FaultTarget) -> str:
    """A process can neither open nor accept anything."""
    name = target.random.choice([COORDINATOR, target.node(), target.node()])
    used = max(map(int, os.listdir(f"/proc/{target.cluster.pid(name)}/fd")))
    await target.limited(name, resource.RLIMIT_NOFILE, used + 1)
    return name


FAULTS: Final[dict[str, Fault]] = {
    "kill-decode": lambda target: _kill(target, "decode"),
    "kill-prefill": lambda target: _kill(target, "prefill"),
    "kill-pair": _kill_pair,
    "kill-all-decode": _kill_pool,
    KILL_LOADING: _kill_loading,
    "drain-decode": lambda target: _drain(target, "decode"),
    "drain-prefill": lambda target: _drain(target, "prefill"),
    "drain-and-kill": _kill_while_draining,
    "freeze-decode": lambda target: _freeze(target, "decode"),
    "freeze-prefill": lambda target: _freeze(target, "prefill"),
    STOP_ENGINE: _stop_engine,
    "freeze-coordinator": _freeze_coordinator,
    KILL_COORDINATOR: _kill_coordinator,
    "stutter": _stutter,
    "flip": _flip,
    "cut": _cut,
    "swallow": _swallow,
    "slow-link": _slow_link,
    "lossy-link": _lossy_link,
    "part-coordinator": _part_coordinator,
    "part-nodes": _part_nodes,
    "part-host": _part_host,
    "part-one-way": _part_one_way,
    "slow-host": _slow_host,
    FULL_DISK: _full_disk,
    NO_DESCRIPTORS: _no_descriptors,
}
# How many hosts there have to be, the coordinator's among them.
NEEDS_HOSTS: Final = {
    "part-coordinator": 2,
    "part-nodes": 3,
    "part-host": 3,
    "part-one-way": 2,
    "slow-host": 2,
}
# Kinds that a mode has no nodes for, or whose nodes refuse.
NOT_IN: Final[dict[Mode, frozenset[str]]] = dict.fromkeys(
    ONE_POOL,
    frozenset({"kill-prefill", "kill-pair", "drain-prefill", "freeze-prefill", "flip"}),
)
