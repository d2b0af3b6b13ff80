"""Plans a cluster's processes before any of them is started: names, configs, cores and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from pdserve.commands.cluster.config import SLEEP_AFTER_S, ClusterConfig
from pdserve.commands.cluster.placement import (
    assign_cores,
    assign_device,
    check_splittable,
    coordinator_cores,
    gpus_of_node,
)
from pdserve.node.memory.meminfo import available_bytes
from pdserve.node.start.cores import plan_cores
from pdserve.protocol.status import ClusterStatus
from pdserve.settings.access import AccessConfig
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import (
    ONE_POOL,
    CoordinatorConfig,
    EngineConfig,
    NodeConfig,
    RoutingConfig,
    WeightsConfig,
)
from pdserve.settings.flags import as_flags
from pdserve.settings.models import read_models
from pdserve.settings.places import PlaceConfig, check_place
from pdserve.settings.timeouts import CoordinatorTimeouts, NodeTimeouts
from pdserve.settings.values import IN_MEMORY, format_cpus, parse_bytes
from pdserve.shared.addresses import format_address, loopback
from pdserve.shared.errors import ConfigError

COORDINATOR: Final = "coordinator"

Kind = Literal["coordinator", "prefill", "decode"]


class PlannedNode(NamedTuple):
    """A node, before its cores and its machine are known."""

    name: str  # also its node id
    kind: Kind
    model: str = ""  # of the models file, with which it begins; empty: there is no such file
    place_of: str = ""  # the node that it is a place of; empty: it is one itself
    place: int = 0  # its number there

    @property
    def node(self) -> str:
        """What cores and memory are counted for."""
        return self.place_of or self.name


@dataclass(frozen=True)
class Machine:
    """The resources of this machine that a cluster may use."""

    cores: Sequence[int]
    num_gpus: int = 0


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a cluster."""

    name: str  # for a node, also its node id
    kind: Kind
    config: CoordinatorConfig | NodeConfig

    @property
    def arguments(self) -> list[str]:
        """Its command line after `pdserve`."""
        return [self.kind, *as_flags(self.config)]


def plan_cluster(
    config: ClusterConfig,
    http_port: int,
    grpc_port: int,
    machine: Machine,
    ledger: Callable[[str], str] = lambda _: "",
) -> list[ProcessPlan]:
    """The coordinator, then prefill-0, prefill-1, ..., decode-0, ...

    `ledger` says which file the places of a node share, by its name.

    Raises:
        ConfigError: the numbers of nodes contradict the mode, or the machine does.
    """
    nodes = cluster_nodes(config)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(n.node for n in nodes))}
    shares = assign_cores(len(numbers), machine.cores)
    engines = [
        _placed(config.engine, numbers[n.node], shares[numbers[n.node]], machine.num_gpus)
        for n in nodes
    ]
    for node, engine in zip(nodes, engines, strict=True):
        if node.place_of:
            check_place(engine, multiplexed=config.mode == "multiplexed")
    memory = place_memory(config, nodes)
    if config.mode == "multiplexed":
        check_splittable(engines, len(machine.cores))
    on_gpu = Counter(engine.device for engine in engines if engine.device.startswith("cuda"))
    engines = [
        replace(engine, kv_utilization=engine.kv_utilization / on_gpu.get(engine.device, 1))
        for engine in engines
    ]
    core_plans = [plan_cores(engine, machine.cores) for engine in engines]
    cpus = format_cpus(coordinator_cores(core_plans, machine.cores))
    grpc_host = loopback(config.host)  # all nodes are here, and nobody else may join
    coordinator = plan_coordinator(config, http_port, grpc_host, grpc_port, cpus)
    plans = [ProcessPlan(COORDINATOR, COORDINATOR, coordinator)]
    address = format_address(grpc_host, grpc_port)
    for node, engine in zip(nodes, engines, strict=True):
        planned = plan_node(config, node, address, engine)
        if node.place_of:
            place = PlaceConfig(
                ledger=ledger(node.place_of),
                place=node.place,
                place_of=node.place_of,
                memory=str(memory),
            )
            planned = replace(planned, place=place)
        plans.append(ProcessPlan(node.name, node.kind, planned))
    return plans


def place_memory(config: ClusterConfig, nodes: Sequence[PlannedNode]) -> int:
    """Bytes of each node of which several models have places; 0: there is none.

    Raises:
        ConfigError: the size of the file is none.
    """
    shared = {node.place_of for node in nodes if node.place_of}
    if not shared:
        return 0
    memory = read_models(config.models).shared.memory
    return available_bytes() // (2 * len(shared)) if memory == "auto" else parse_bytes(memory)


def cluster_nodes(config: ClusterConfig) -> list[PlannedNode]:
    """Each node: prefill-0, prefill-1, ..., decode-0, ...

    Raises:
        ConfigError: the numbers of nodes contradict the mode, or the file of models is wrong.
    """
    if config.models:
        return _nodes_of_models(config)
    pools: list[tuple[Kind, int]] = [
        ("prefill", config.num_prefill),
        ("decode", config.num_decode),
    ]
    return [PlannedNode(f"{kind}-{i}", kind) for kind, number in pools for i in range(number)]


def _nodes_of_models(config: ClusterConfig) -> list[PlannedNode]:
    file = read_models(config.models)
    kinds: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    if config.mode in ONE_POOL:
        kinds = ("decode",)
    nodes = [
        PlannedNode(
            f"{kind}-{index}",
            kind,
            begins.model,
            "" if begins.shared is None else f"shared-{kind}-{begins.shared}",
            begins.place,
        )
        for kind in kinds
        for index, begins in enumerate(file.nodes(kind))
    ]
    for kind in kinds:
        if not any(node.kind == kind for node in nodes):
            raise ConfigError(
                f"{config.models}: there is no {kind} node, which --mode {config.mode} needs: "
                f"give a model min = {{ {kind} = 1 }}, or all of them shared = {{ {kind} = 1 }}"
            )
    return nodes


def plan_coordinator(
    config: ClusterConfig, http_port: int, grpc_host: str, grpc_port: int, cpus: str = ""
) -> CoordinatorConfig:
    """The coordinator's config: where clients and nodes reach it, and the cores to run on."""
    return CoordinatorConfig(
        host=config.host,
        port=http_port,
        grpc_host=grpc_host,
        grpc_port=grpc_port,
        cpus=cpus,
        mode=config.mode,
        max_inflight=config.max_inflight,
        models=config.models,
        checkpoint=config.checkpoint,
        answers=_answer_config(config),
        routing=_routing_config(config),
        access=_access_config(config),
        tracing=config.tracing,
        timeouts=config.timeouts.part(CoordinatorTimeouts),
    )


def _routing_config(config: ClusterConfig) -> RoutingConfig:
    """That of the coordinator: pools that scale help each other, and may have to be woken."""
    routing, scale = config.routing, config.scale
    if scale is None:
        return routing
    sleep_after_s = routing.sleep_after_s
    if scale.least == 0:
        sleep_after_s = sleep_after_s or SLEEP_AFTER_S
    has_two_pools = config.mode not in ONE_POOL
    return replace(routing, rebalance=has_two_pools, sleep_after_s=sleep_after_s)


def _answer_config(config: ClusterConfig) -> AnswerConfig:
    """Those of the coordinator: a free port is not what a file could be found again by."""
    if config.port == 0 and not config.answers.store:
        return replace(config.answers, store=IN_MEMORY)
    return config.answers


def _access_config(config: ClusterConfig) -> AccessConfig:
    """Likewise."""
    if config.port == 0 and not config.access.usage_db:
        return replace(config.access, usage_db=IN_MEMORY)
    return config.access


def plan_node(
    config: ClusterConfig, node: PlannedNode, coordinator_address: str, engine: EngineConfig
) -> NodeConfig:
    """A node's config, but for the network that its machine has."""
    weights = WeightsConfig(model=node.model) if config.models else None
    return NodeConfig(
        node_id=node.name,
        coordinators=[coordinator_address],
        transports=config.transports,
        checksums=config.checksums,
        multiplexed=config.mode == "multiplexed",
        models=config.models,
        checkpoint=weights or config.checkpoint.part(WeightsConfig),
        engine=engine,
        speculation=config.speculation,
        profile=config.profile,
        policy=config.policy,
        handoff=config.handoff,
        prefix=config.prefix,
        timeouts=config.timeouts.part(NodeTimeouts),
    )


def planned_again(plan: ProcessPlan, status: ClusterStatus) -> ProcessPlan:
    """The plan by which a node that has ended starts again, if the coordinator says this now.

    Of several models, it begins as the one that it was ready as. If another place of its node has
    that one by now, it begins as the first one that none of them has.
    """
    config = plan.config
    if not isinstance(config, NodeConfig) or not config.models:
        return plan
    was = [n.model for n in status.nodes if n.node_id == plan.name and n.state == "ready"]
    was += [node.model for node in status.coordinator.absent if node.node_id == plan.name]
    beside = {
        node.model
        for node in status.nodes
        if node.place_of and node.place_of == config.place.place_of and node.node_id != plan.name
    }
    names = read_models(config.models).models
    likely = [*was, config.checkpoint.model, *names]
    found = (name for name in likely if name in names and name not in beside)
    model = WeightsConfig(model=next(found, config.checkpoint.model))
    return ProcessPlan(plan.name, plan.kind, replace(config, checkpoint=model))


def crowding(plans: Sequence[ProcessPlan], cores: Sequence[int], *, has_mps: bool) -> str:
    """A warning if nodes wait for each other; otherwise empty.

    That is if there are more compute threads than cores, or a GPU has several nodes, whose steps
    take turns unless CUDA's multi-process service (MPS) runs.
    """
    nodes = [plan.config for plan in plans if isinstance(plan.config, NodeConfig)]
    devices = [node.engine.device for node in nodes]
    gpus = Counter(device for device in devices if device.startswith("cuda"))
    shared = [f"{number} nodes on {device}" for device, number in gpus.items() if number > 1]
    if shared and not has_mps:
        return (
            f"{', '.join(shared)}, and no MPS: their steps take turns on it, so comparing modes "
            "there says nothing; start nvidia-cuda-mps-control -d, or give each node a GPU"
        )
    on_cpus = {
        node.place.place_of or node.node_id: node.engine  # the steps of places take turns
        for node in nodes
        if not node.engine.device.startswith("cuda")
    }
    shares = [plan_cores(engine, cores) for engine in on_cpus.values()]
    num_threads = sum(share.num_threads for share in shares)
    num_cores = len({core for share in shares for core in share.compute})
    if num_threads <= num_cores:
        return ""
    return (
        f"{len(shares)} nodes compute with {num_threads} threads on {num_cores} cores: their steps "
        "will wait for each other; predictions of TTFT and TPOT hold for fewer nodes, or more cores"
    )


def _placed(engine: EngineConfig, number: int, cores: list[int], num_gpus: int) -> EngineConfig:
    """The engine config of node `number`, with its share of the machine."""
    return replace(
        engine,
        cpus=format_cpus(cores),
        device=assign_device(engine.device, number, num_gpus, gpus_of_node(engine)),
    )
