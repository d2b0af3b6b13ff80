"""The machines of a Ray cluster as the site of ours.

Each process is run by an actor, and Ray spreads them over machines. Those of a pool have a
placement group, so that Ray finds room for all of a pool or for none of it, and finds it again for
those whose machine was lost. Nodes that come and go with the load have none: it would keep the room
of those that went. The coordinator is on Ray's head machine, whose address is known and without
which there is no Ray: its own must not change.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.commands.cluster.child import ExitSink, LineSink, Process
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.on_ray.demands import (
    RayDemand,
    check_no_places,
    check_splits,
    demand,
    fitted,
)
from pdserve.commands.cluster.on_ray.process import ActorProcess, answer
from pdserve.commands.cluster.on_ray.runner import RayPlace, RayRunner
from pdserve.commands.cluster.plan import (
    COORDINATOR,
    PlannedNode,
    ProcessPlan,
    cluster_nodes,
    plan_coordinator,
    plan_node,
)
from pdserve.settings.access import keys_of_coordinator
from pdserve.shared.addresses import ANY_HOST, format_address, is_loopback
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import StartFailed

_HEAD = {"node:__internal_head__": 0.001}  # what only Ray's head machine has


@dataclass(frozen=True)
class _Share:
    """Which part of a machine a node has."""

    machine: str
    number: int


class OnRay:
    """A Site: what `pdserve up --on ray` runs on."""

    def __init__(self, config: ClusterConfig) -> None:
        """Nothing is asked of Ray yet."""
        self._config = config
        self.supervisor_token = secrets.token_hex(32)
        self._token = secrets.token_hex(32)  # whoever has it may join
        self._demand = RayDemand(0, 0, 0)
        self._groups: list[PlacementGroup] = []
        self._in_groups: dict[str, PlacementGroupSchedulingStrategy] = {}  # by name of a node
        self._actors: dict[str, Any] = {}  # name of a process |-> handle of its Runner
        self._shares: dict[str, _Share] = {}  # name of a node |-> where it has been started
        self._head = ""  # address of the machine of the coordinator
        self._ports = [0, 0]  # HTTP, gRPC
        self.warning = ""

    @property
    def http_address(self) -> str:
        """As Site.http_address."""
        host = self._config.host
        return format_address(self._head if host in ANY_HOST else host, self._ports[0])

    @property
    def grpc_address(self) -> str:
        """As Site.grpc_address."""
        return format_address(self._head, self._ports[1])

    async def plan(self) -> list[ProcessPlan]:
        """As Site.plan."""
        config = self._config
        nodes = cluster_nodes(config)
        check_no_places(nodes)
        await asyncio.to_thread(_connect, config.on)
        if threading.current_thread() is threading.main_thread():
            # Ray's own writes a stack, as of a crash, before it calls the one that was there.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._demand = demand(config.engine, len(nodes), machines)
        if config.mode == "multiplexed":
            check_splits(self._demand)
        await self._reserve_ports()
        await self._place(nodes)
        coordinator = plan_coordinator(config, self._ports[0], self._head, self._ports[1])
        return [
            ProcessPlan(COORDINATOR, COORDINATOR, coordinator),
            *(
                ProcessPlan(
                    node.name,
                    node.kind,
                    plan_node(config, node, self.grpc_address, config.engine),
                )
                for node in nodes
            ),
        ]

    async def _reserve_ports(self) -> None:
        """Have Ray place the coordinator's actor."""
        keys = keys_of_coordinator(os.environ, self.supervisor_token)
        runner = ray.remote(RayRunner).options(num_cpus=0, resources=_HEAD, max_restarts=-1)
        actor = self._actors[COORDINATOR] = runner.remote(self._token, keys)
        config = self._config
        async with self._in_time("the coordinator on Ray's head machine"):
            self._head = (await answer(actor.place.remote())).address
            if is_loopback(config.host) and self._head != ray.util.get_node_ip_address():
                raise ConfigError(
                    f"--host {config.host}: the coordinator runs on {self._head}, Ray's head "
                    "machine; name an address of it that can be reached from here, or 0.0.0.0"
                )
            addresses = [(config.host, config.port), (self._head, 0)]
            self._ports = await answer(actor.reserve.remote(addresses))

    async def _place(self, nodes: Sequence[PlannedNode]) -> None:
        """Have Ray find room for both pools, as far as they are there from the start on."""
        scale, bundle = self._config.scale, self._demand.bundle
        first = [node for node in nodes if scale is None or scale.is_first(node.name)]
        for pool in ("prefill", "decode") if scale is None else ():
            names = [node.name for node in first if node.kind == pool]
            if names:
                group = placement_group([bundle] * len(names), strategy="SPREAD")
                self._groups.append(group)
                self._in_groups |= {
                    name: PlacementGroupSchedulingStrategy(group, index)
                    for index, name in enumerate(names)
                }
        async with self._in_time(f"{len(first)} nodes with {_told(bundle)} each"):
            await asyncio.gather(*(answer(group.ready()) for group in self._groups))
            await asyncio.gather(*(answer(self._actor(n.name).place.remote()) for n in first))

    def _actor(self, name: str) -> Any:
        """The actor of a node: its Runner's handle."""
        if name not in self._actors:
            asked = self._demand
            runner = ray.remote(RayRunner).options(
                num_cpus=asked.cpus,
                num_gpus=asked.gpus,
                memory=asked.memory_bytes or None,
                max_restarts=-1,
                scheduling_strategy=self._in_groups.get(name, "SPREAD"),
            )
            self._actors[name] = runner.remote(self._token, {})
        return self._actors[name]

    @asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        start_s = self._config.start_s
        try:
            async with asyncio.timeout(start_s):
                yield
        except TimeoutError as error:
            raise StartFailed(
                f"Ray found no room for {what} within {start_s:g} s (start_s): it has "
                f"{_told(ray.cluster_resources())}, and now {_told(ray.available_resources())} free"
            ) from error
        except RayTaskError as error:  # what an actor has raised
            raise error.cause from error
        except RayError as error:
            raise StartFailed(f"Ray could not place {what}: {error}") from error

    def start(
        self, name: str, argv: Sequence[str], on_line: LineSink, on_exit: ExitSink
    ) -> Process:
        """As Site.start."""

        async def command_line() -> Sequence[str]:
            return [*argv, *await self._fit(name)]

        return ActorProcess(name, self._actor(name), command_line, on_line, on_exit)

    def leave(self, name: str) -> None:
        """As Site.leave."""
        if name in self._actors:
            ray.kill(self._actors.pop(name))
        self._shares.pop(name, None)

    async def _fit(self, name: str) -> list[str]:
        """The flags that depend on the machine on which Ray has put it."""
        place: RayPlace = await answer(self._actors[name].place.remote())
        if name == COORDINATOR:
            return []
        share = self._shares.get(name)
        if share is None or share.machine != place.machine:
            others = [share for other, share in self._shares.items() if other != name]
            taken = {share.number for share in others if share.machine == place.machine}
            number = next(number for number in count() if number not in taken)
            share = self._shares[name] = _Share(place.machine, number)
        return [f"--host={place.address}", *fitted(self._demand, share.number, place.cores)]

    async def release(self) -> None:
        """As Site.release."""
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors.clear()
        self._groups.clear()
        await asyncio.to_thread(ray.shutdown)


def _told(resources: Mapping[str, float]) -> str:
    """Of what Ray counts, that which nodes ask for."""
    cpus, gpus, memory = (resources.get(name, 0) for name in ("CPU", "GPU", "memory"))
    return f"{cpus:g} CPUs, {gpus:g} GPUs and {memory / 2**30:.1f} GiB"


def _connect(on: str) -> None:
    """Become a driver of the Ray cluster at `ray://HOST:PORT`, or of this machine's (`ray`)."""
    address = "auto" if on == "ray" else on
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartFailed(
            f"no Ray cluster for --on {on}: {error} (ray start --head begins one on this machine)"
        ) from error
