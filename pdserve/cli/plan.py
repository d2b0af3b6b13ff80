"""A cluster's processes before any of them exists: names, configs, cores, devices, ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from pdserve.cli.cluster_config import ClusterConfig
from pdserve.cli.flags import as_flags
from pdserve.cli.placement import assign_cores, assign_device
from pdserve.cli.ports import reachable
from pdserve.config import CoordinatorConfig, EngineConfig, NodeConfig
from pdserve.config_values import format_cpus
from pdserve.node.cores import plan_cores

COORDINATOR = "coordinator"

Kind = Literal["coordinator", "prefill", "decode"]


@dataclass(frozen=True)
class Machine:
    """What of this machine a cluster may use."""

    cores: Sequence[int]
    num_gpus: int = 0


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a cluster."""

    name: str  # of a node: also its node id
    kind: Kind
    config: CoordinatorConfig | NodeConfig

    @property
    def arguments(self) -> list[str]:
        """What follows `pdserve` on its command line."""
        return [self.kind, *as_flags(self.config)]


def plan_cluster(
    config: ClusterConfig, http_port: int, grpc_port: int, machine: Machine
) -> list[ProcessPlan]:
    """The coordinator, then prefill-0, prefill-1, ..., decode-0, ...

    Raises:
        ConfigError: the numbers of nodes contradict the mode.
    """
    coordinator = CoordinatorConfig(
        host=config.host,
        port=http_port,
        grpc_port=grpc_port,
        mode=config.mode,
        max_inflight=config.max_inflight,
        checkpoint=config.checkpoint,
        answers=config.answers,
        routing=config.routing,
        access=config.access,
        timeouts=config.timeouts,
    )
    plans = [ProcessPlan(COORDINATOR, "coordinator", coordinator)]
    prefill: list[Kind] = ["prefill"] * config.num_prefill
    decode: list[Kind] = ["decode"] * config.decode
    kinds = prefill + decode
    shares = assign_cores(len(kinds), machine.cores)
    for number, (kind, cores) in enumerate(zip(kinds, shares, strict=True)):
        name = f"{kind}-{kinds[:number].count(kind)}"
        engine = _placed(config.engine, number, cores, machine.num_gpus)
        node = NodeConfig(
            node_id=name,
            coordinators=[reachable(config.host, grpc_port)],
            transports=config.transports,
            checksums=config.checksums,
            checkpoint=config.checkpoint,
            engine=engine,
            profile=config.profile,
            policy=config.policy,
            handoff=config.handoff,
            prefix=config.prefix,
            timeouts=config.timeouts,
        )
        plans.append(ProcessPlan(name, kind, node))
    return plans


def crowding(plans: Sequence[ProcessPlan], cores: Sequence[int]) -> str:
    """What is to be said when more threads compute than there are cores; else nothing."""
    engines = [plan.config.engine for plan in plans if isinstance(plan.config, NodeConfig)]
    shares = [
        plan_cores(engine, cores) for engine in engines if not engine.device.startswith("cuda")
    ]
    num_threads = sum(share.num_threads for share in shares)
    num_cores = len({core for share in shares for core in share.compute})
    if num_threads <= num_cores:
        return ""
    return (
        f"{len(shares)} nodes compute with {num_threads} threads on {num_cores} cores: their steps "
        "will wait for each other; predictions of TTFT and TPOT hold for fewer nodes, or more cores"
    )


def _placed(engine: EngineConfig, number: int, cores: list[int], num_gpus: int) -> EngineConfig:
    """The engine of node `number` on its share of the machine."""
    return replace(
        engine,
        cpus=format_cpus(cores),
        device=assign_device(engine.device, number, num_gpus),
    )
