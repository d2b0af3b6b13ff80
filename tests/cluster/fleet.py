"""Clusters as these tests want them: small, watched, with nodes that may differ from each other."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from pdserve.commands.cluster.child import Child, Exit
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.commands.cluster.status import fetch_status
from pdserve.commands.cluster.supervisor import OWN_COMMAND, Cluster
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import (
    CheckpointConfig,
    CoordinatorConfig,
    EngineConfig,
    ProfileConfig,
    RoutingConfig,
)
from pdserve.settings.flags import as_flags
from pdserve.settings.timeouts import CoordinatorTimeouts, Timeouts
from pdserve.settings.values import IN_MEMORY
from pdserve.shared.errors import ClusterError
from tests.cluster.client import MODEL
from tests.cluster.forked import PROFILE_S, ForkedChild

START_S = 90.0
LONG_S = {"drain_s": 60.0, "liveness_s": 30.0, "lease_s": 60.0, "transfer_s": 60.0}
ROUTING = RoutingConfig(router="least-loaded", admission=False, price=["prefill=2.5", "decode=1"])
# Events, however late a busy machine lets anybody see them. Nothing here comes of a deadline: those
# that would end a request in the end anyway are far longer (`fleet_config`).
SETTLE_S = 30.0  # until what a request held must be free again
HEARD_S = 30.0  # until a client is told that a process it needs has gone
_TICK_S = 0.02

# Gauges of a node that are 0 when it holds nothing for anybody.
_AT_WORK = ("pinned_blocks", "legs", "running_requests", "waiting_requests", "queue_tokens")

# What no process may ever write, but for one line of grpc's (`_is_cut_call`).
_COMPLAINTS = ("Traceback (most recent call last)", "never retrieved", "was never awaited")
_LINES_SHOWN = 40


class Fleet(Cluster):
    """A cluster that remembers what its processes wrote; `flags` change single ones of them.

    Its processes are forked, unless `make_child` is the supervisor's own Child.
    """

    def __init__(
        self,
        config: ClusterConfig,
        flags: dict[str, list[str]] | None = None,
        make_child: type[Child] = ForkedChild,
        *,
        restarts: bool = False,
    ) -> None:
        super().__init__(config, on_line=self._remember, make_child=make_child, restarts=restarts)
        self.lines: list[tuple[str, str]] = []  # (process, line)
        self._flags = flags or {}

    def command_line(self, name: str) -> list[str]:
        """As Cluster.command_line; a flag that is given again counts."""
        return super().command_line(name) + self._flags.get(name, [])

    def complaints(self) -> str:
        """What was written about errors that nobody handled, each with what follows it."""
        found = [
            index
            for index, (_, line) in enumerate(self.lines)
            if any(complaint in line for complaint in _COMPLAINTS) and not self._is_cut_call(index)
        ]
        shown = [self.lines[index : index + _LINES_SHOWN] for index in found]
        return "\n---\n".join("\n".join(f"{n}: {line}" for n, line in part) for part in shown)

    def _is_cut_call(self, index: int) -> bool:
        """Whether grpc tells, in its own way, that a server's stop has cut a call off."""
        process = self.lines[index][0]
        rest = [line for name, line in self.lines[index + 1 : index + 20] if name == process]
        return bool(rest) and "_schedule_rpc_coro" in rest[0]

    async def gauges(self, name: str) -> dict[str, float]:
        """A node's metrics without labels, by name without the prefix."""
        return await read_gauges((await self.metrics_addresses())[name])

    async def wait_for(
        self, name: str, is_so: Callable[[dict[str, float]], bool], within_s: float = 20.0
    ) -> dict[str, float]:
        """Poll a node's gauges until they are so."""
        address = (await self.metrics_addresses())[name]
        gauges: dict[str, float] = {}

        async def look() -> bool:
            nonlocal gauges
            gauges = await read_gauges(address)
            return is_so(gauges)

        await poll(look, within_s, lambda: f"{name}: {gauges}")
        return gauges

    async def assert_baseline(self, within_s: float = SETTLE_S) -> None:
        """No request is in flight, and every attached node's blocks are free, in bounded time."""
        in_flight = -1

        async def look() -> bool:
            nonlocal in_flight
            in_flight = (await self.status()).inflight
            return in_flight == 0

        await poll(look, within_s, lambda: f"{in_flight} requests are still in flight")
        await assert_free((await self.metrics_addresses()).values(), within_s)

    async def wait_gone(self, name: str, within_s: float = HEARD_S) -> None:
        """Until the coordinator has noticed that a node is not there any more."""

        async def look() -> bool:
            return (await self.status()).node(name) is None

        await poll(look, within_s, lambda: f"{name} is still attached")

    async def wait_back(self, within_s: float = 60.0) -> None:
        """Until every node is a ready member again."""
        missing = ""

        async def look() -> bool:
            nonlocal missing
            missing = (await self.status()).waiting_for(self.node_names)
            return not missing

        await poll(look, within_s, lambda: f"still missing: {missing}")

    async def restore(self) -> None:
        """Start whatever node is not running."""
        dead = [name for name in self.node_names if not self.is_running(name)]
        await asyncio.gather(*(self.start_node(name) for name in dead))

    async def restart_coordinator(self) -> None:
        """Kill it, if it runs, and start it on the same ports; returns once the nodes are back."""
        await self.kill_node(COORDINATOR)
        await self.start_node(COORDINATOR)
        await self.wait_back()

    def _remember(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        sys.stderr.write(f"{name:12}| {line}\n")


def fleet_config(checkpoint: Path, **fields: Any) -> ClusterConfig:
    """A small float32 cluster; `engine` and `timeouts` are dicts of what differs.

    Every node gets its share, whatever it is predicted to be worth, and a slow machine must not
    have anybody refused: neither is what most of these tests are about.
    """
    engine = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "kv_memory": "64MiB",
        "block_size": 16,  # short prompts are to have several blocks
    }
    return ClusterConfig(
        port=0,
        start_s=START_S,
        checkpoint=CheckpointConfig(model=str(checkpoint), served_model_name=MODEL),
        engine=EngineConfig(**(engine | fields.pop("engine", {}))),
        profile=ProfileConfig(profile_s=PROFILE_S),
        routing=fields.pop("routing", ROUTING),
        timeouts=Timeouts(**(LONG_S | fields.pop("timeouts", {}))),
        **fields,
    )


def models_config(folder: Path, **fields: Any) -> ClusterConfig:
    """The same of the models in the file `models.toml` of a folder."""
    return replace(
        fleet_config(folder, **fields),
        checkpoint=CheckpointConfig(),
        models=str(folder / "models.toml"),
    )


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    """The fleet, ready. At the end everything must be free, and nobody may have complained."""
    try:
        await fleet.spawn()
        await fleet.wait_ready()
        yield fleet
        if fleet.is_running(COORDINATOR):
            await fleet.assert_baseline()
        assert not fleet.complaints(), fleet.complaints()
    finally:
        await fleet.kill()


class SecondCoordinator:
    """Another coordinator for the same nodes, which are given `grpc_address`.

    It runs within the context, which may be entered again: then it is back on the same ports.
    """

    def __init__(self, checkpoint: Path | None, store: str = IN_MEMORY, **fields: Any) -> None:
        """`checkpoint`: None: `fields` have `models`."""
        answers = replace(fields.pop("answers", AnswerConfig()), store=store)
        self._ports = [ReservedPort("127.0.0.1"), ReservedPort("127.0.0.1")]
        self._config = CoordinatorConfig(
            port=self._ports[0].port,
            grpc_port=self._ports[1].port,
            checkpoint=CheckpointConfig(model=str(checkpoint), served_model_name=MODEL)
            if checkpoint
            else CheckpointConfig(),
            answers=answers,
            timeouts=Timeouts(**LONG_S).part(CoordinatorTimeouts),
            **fields,
        )
        self.url = f"http://127.0.0.1:{self._ports[0].port}"
        self.grpc_address = f"127.0.0.1:{self._ports[1].port}"
        self.lines: list[str] = []

    async def __aenter__(self) -> SecondCoordinator:
        argv = [*OWN_COMMAND, COORDINATOR, *as_flags(self._config)]
        ends: list[Exit] = []
        self.child = ForkedChild(
            "coordinator-2",
            [*argv, f"--die-with-parent={os.getpid()}"],
            lambda _, line: self.lines.append(line),
            ends.append,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.child.stop(5.0)

    def release_ports(self) -> None:
        """It will not be started again."""
        for port in self._ports:
            port.close()

    async def wait_ready(self, node_ids: Sequence[str], within_s: float = START_S) -> None:
        """Until these nodes are ready members of it."""

        async def look() -> bool:
            try:
                status = await fetch_status(self.url)
            except ClusterError:
                return False
            return not status.waiting_for(list(node_ids))

        await poll(look, within_s, lambda: f"{node_ids} are not all ready at {self.url}")


async def poll(
    is_so: Callable[[], Awaitable[bool]], within_s: float, describe: Callable[[], str]
) -> None:
    """Ask until it is so; fails when it is not in time."""
    deadline_s = time.monotonic() + within_s
    while not await is_so():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {describe()}"
        await asyncio.sleep(_TICK_S)


async def assert_free(metrics_addresses: Iterable[str], within_s: float = SETTLE_S) -> None:
    """Every block of these nodes is free, and nothing is under way there, in bounded time."""
    held: list[dict[str, float]] = []

    async def look() -> bool:
        held.clear()
        for address in metrics_addresses:
            gauges = await read_gauges(address)
            if gauges["free_blocks"] != gauges["blocks"] or any(gauges[name] for name in _AT_WORK):
                held.append(gauges)
        return not held

    await poll(look, within_s, lambda: f"still held: {held}")


async def read_gauges(metrics_address: str) -> dict[str, float]:
    """The metrics without labels of the node at that address."""
    timeout = aiohttp.ClientTimeout(total=HEARD_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://{metrics_address}/metrics") as response,
    ):
        text = await response.text()
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {
        name.removeprefix("pdserve_").removesuffix("_total"): float(value)
        for name, value in lines
        if "{" not in name
    }


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
