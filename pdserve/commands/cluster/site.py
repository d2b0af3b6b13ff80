"""Where the processes of a cluster run: on this machine, unless somebody else offers others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Protocol

from pdserve.commands.cluster.child import Child, ExitSink, LineSink, Process
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.placement import count_gpus, has_mps, usable_cores
from pdserve.commands.cluster.plan import COORDINATOR, Machine, ProcessPlan, crowding, plan_cluster
from pdserve.commands.cluster.ports import ReservedPort, reachable
from pdserve.settings.access import keys_of_coordinator
from pdserve.shared.addresses import loopback
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.extras import how_to_install


class Site(Protocol):
    """Plans a cluster for the machines that it has, and starts processes there."""

    @property
    def http_address(self) -> str:
        """The `host:port` at which clients reach the coordinator, once there is a plan."""
        ...

    @property
    def grpc_address(self) -> str:
        """The `host:port` at which nodes reach the coordinator, once there is a plan."""
        ...

    @property
    def supervisor_token(self) -> str:
        """With which this process may read the coordinator's status."""
        ...

    @property
    def warning(self) -> str:
        """What is wrong with the plan, though it works; or nothing."""
        ...

    async def plan(self) -> list[ProcessPlan]:
        """Reserve what is needed; the coordinator, then prefill-0, ..., decode-0, ...

        Raises:
            ConfigError: a port is in use, or the config contradicts itself.
            StartFailed: what it takes is not to be had in time.
        """
        ...

    def start(
        self, name: str, argv: Sequence[str], on_line: LineSink, on_exit: ExitSink
    ) -> Process:
        """Start the process of that name, which ends when this process does.

        Raises:
            OSError: the program cannot be started.
        """
        ...

    def leave(self, name: str) -> None:
        """Give back what a node has had, which has ended and may be started again."""
        ...

    async def release(self) -> None:
        """Give back what was reserved, when all processes have ended. May be called again."""
        ...


def remote_site(config: ClusterConfig) -> Site | None:
    """Where else the processes are to run; None: on this machine.

    Raises:
        ConfigError: what it takes is not installed.
    """
    if not config.on:
        return None
    try:
        from pdserve.commands.cluster.on_ray.site import OnRay
    except ImportError as error:
        raise ConfigError(f"--on ray needs an extra: {how_to_install('ray')}") from error
    return OnRay(config)


class ThisMachine:
    """All processes are children of this one."""

    def __init__(
        self, config: ClusterConfig, make_child: Callable[..., Child], machine: Machine | None
    ) -> None:
        """As for Cluster."""
        self._config = config
        self._make_child = make_child
        self._machine = machine
        self.supervisor_token = token_hex(32)
        self._ports: list[ReservedPort] = []  # HTTP, gRPC
        self._ledgers: dict[str, int] = {}  # node |-> descriptor of what its places share
        self.warning = ""

    @property
    def http_address(self) -> str:
        """As Site.http_address."""
        return reachable(self._config.host, self._ports[0].port)

    @property
    def grpc_address(self) -> str:
        """As Site.grpc_address."""
        return reachable(loopback(self._config.host), self._ports[1].port)

    async def plan(self) -> list[ProcessPlan]:
        """As Site.plan."""
        config = self._config
        machine = self._machine or Machine(
            usable_cores(config.engine.cpus), await asyncio.to_thread(count_gpus)
        )
        self._ports = [ReservedPort(config.host, config.port)]
        self._ports.append(ReservedPort(loopback(config.host)))
        http_port, grpc_port = (reserved.port for reserved in self._ports)
        plans = plan_cluster(config, http_port, grpc_port, machine, self._ledger)
        self.warning = crowding(plans, machine.cores, has_mps=has_mps())
        return plans

    def start(
        self, name: str, argv: Sequence[str], on_line: LineSink, on_exit: ExitSink
    ) -> Process:
        """As Site.start."""
        words = [*argv, f"--die-with-parent={os.getpid()}"]
        keys = keys_of_coordinator(os.environ, self.supervisor_token) if name == COORDINATOR else {}
        return self._make_child(name, words, on_line, on_exit, keys=keys)

    def leave(self, name: str) -> None:
        """As Site.leave."""

    def _ledger(self, node: str) -> str:
        """A file that its places open, and that nobody has to remove."""
        if node not in self._ledgers:
            self._ledgers[node] = os.memfd_create(f"pdserve-{node}", os.MFD_CLOEXEC)
        return f"/proc/{os.getpid()}/fd/{self._ledgers[node]}"

    async def release(self) -> None:
        """As Site.release."""
        for reserved in self._ports:
            reserved.close()
        while self._ledgers:
            os.close(self._ledgers.popitem()[1])
