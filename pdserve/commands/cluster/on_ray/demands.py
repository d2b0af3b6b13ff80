"""What a node asks Ray for, and what it takes of the machine that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.commands.cluster.placement import gpus_of_node
from pdserve.commands.cluster.plan import PlannedNode
from pdserve.settings.config import EngineConfig
from pdserve.settings.values import format_cpus, parse_bytes
from pdserve.shared.errors import ConfigError


@dataclass(frozen=True)
class RayDemand:
    """What Ray is to set aside for one node."""

    cpus: int
    gpus: int
    memory_bytes: int  # 0: not told

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray wants it."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes}
        return {name: float(amount) for name, amount in asked.items() if amount}


def demand(
    engine: EngineConfig, num_nodes: int, machines: Sequence[Mapping[str, float]]
) -> RayDemand:
    """What each of `num_nodes` nodes asks for, of machines with these resources.

    CPUs: the compute threads that the config names, or else an equal share of the smallest machine
    that has any, with the nodes spread evenly. A GPU for each rank, if there are any and the config
    does not say otherwise. As memory, the KV cache, if its size is known.

    Raises:
        ConfigError: no machine has a CPU, or the config names what Ray chooses.
    """
    if engine.cpus or engine.device.startswith("cuda:"):
        raise ConfigError("with --on ray, Ray chooses cores and GPUs: leave cpus and cuda:N out")
    cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
    if not cpus:
        raise ConfigError("no machine of the Ray cluster has a CPU for nodes")
    wants_gpu = engine.device == "cuda" or (
        engine.device == "auto" and any(machine.get("GPU", 0) >= 1 for machine in machines)
    )
    at_most = -(-num_nodes // len(cpus))  # nodes of one machine, rounded up
    return RayDemand(
        cpus=engine.threads or max(1, min(cpus) // at_most),
        gpus=gpus_of_node(engine) if wants_gpu else 0,
        memory_bytes=0 if engine.kv_memory == "auto" else parse_bytes(engine.kv_memory),
    )


def check_no_places(nodes: Sequence[PlannedNode]) -> None:
    """Raises ConfigError: several models are to be awake on one node, which actors do not share."""
    if any(node.place_of for node in nodes):
        raise ConfigError(
            "shared.at_once: with --on ray each node has a model for itself: leave it out"
        )


def check_splits(asked: RayDemand) -> None:
    """Raises ConfigError: the nodes of mode multiplexed have no cores to split."""
    if asked.gpus or asked.cpus < 2:
        raise ConfigError(
            f"--mode multiplexed splits the cores of each node, which would have {asked.cpus} CPUs "
            f"and {asked.gpus} GPUs: ask for --threads 2 or more and --device cpu"
        )


def fitted(asked: RayDemand, number: int, cores: Sequence[int]) -> list[str]:
    """The flags of the node that is the `number`-th of its machine.

    It gets cores of its own, as Ray counts CPUs but does not say which. Where Ray counts more than
    there are, nodes take turns on them. Its GPUs are the only ones that its process sees.
    """
    first = number * asked.cpus
    own = {cores[(first + index) % len(cores)] for index in range(asked.cpus)}
    return [f"--cpus={format_cpus(sorted(own))}", f"--device={'cuda:0' if asked.gpus else 'cpu'}"]
