"""Runs the nodes of a cluster on hosts of their own: prefill-0 and decode-0 on one, and so on.

So KV moves through shared memory on a host, and over TCP between two. The coordinator is where this
process is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from msgspec.structs import replace as changed

from pdserve.commands.bench.chaos.hosts import Hosts, address
from pdserve.commands.cluster.child import Child, ExitSink, LineSink, Process
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import COORDINATOR, ProcessPlan
from pdserve.commands.cluster.site import ThisMachine
from pdserve.settings.access import SecurityConfig
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.addresses import format_address


def host_of(name: str, hosts: Hosts) -> int:
    """The host of a process, by its name."""
    if name == COORDINATOR:
        return 0
    return 1 + int(name.rpartition("-")[2]) % (len(hosts) - 1)


class OnHosts(ThisMachine):
    """A Site."""

    def __init__(
        self,
        config: ClusterConfig,
        make_child: Callable[..., Child],
        hosts: Hosts,
        token: Path,
    ) -> None:
        """As ThisMachine; `token` is a file to be made, for who may join."""
        super().__init__(config, make_child, None)
        self._hosts = hosts
        token.write_text(token_hex(32))
        self._security = SecurityConfig(join_token_file=str(token))

    @property
    def grpc_address(self) -> str:
        """As Site.grpc_address."""
        _, _, port = super().grpc_address.rpartition(":")
        return format_address(address(0), int(port))

    async def plan(self) -> list[ProcessPlan]:
        """As Site.plan."""
        return [self._moved(plan) for plan in await super().plan()]

    def _moved(self, plan: ProcessPlan) -> ProcessPlan:
        """The same process, where it can be reached from other hosts."""
        config = plan.config
        if isinstance(config, CoordinatorConfig):
            config = changed(config, grpc_host=address(0), security=self._security)
        else:
            host = address(host_of(plan.name, self._hosts))
            coordinators = [self.grpc_address]
            config = changed(config, host=host, coordinators=coordinators, security=self._security)
        return replace(plan, config=config)

    def start(
        self, name: str, argv: Sequence[str], on_line: LineSink, on_exit: ExitSink
    ) -> Process:
        """As Site.start."""
        with self._hosts.entered(host_of(name, self._hosts)):
            return super().start(name, argv, on_line, on_exit)
