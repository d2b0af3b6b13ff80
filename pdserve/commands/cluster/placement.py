"""Assigns cores to the processes of a cluster, and GPUs to its nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pdserve.node.start.cores import CorePlan
from pdserve.settings.config import EngineConfig
from pdserve.settings.values import format_cpus, parse_cpus
from pdserve.shared.errors import ConfigError

# What there is where a GPU is: the driver's, which containers may not see, its device, and WSL's.
GPU_SIGNS = tuple(map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")))
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_COUNT_GPUS_S = 60.0  # importing torch from a cold disk


def assign_cores(num_nodes: int, cores: Sequence[int]) -> list[list[int]]:
    """The cores of each node: adjacent ones, in shares that differ by at most one.

    With more nodes than cores, node i gets the single core `cores[i % len(cores)]`.
    """
    if num_nodes > len(cores):
        return [[cores[i % len(cores)]] for i in range(num_nodes)]
    bounds = [i * len(cores) // num_nodes for i in range(num_nodes + 1)]
    return [list(cores[a:b]) for a, b in pairwise(bounds)]


def check_splittable(engines: Sequence[EngineConfig], num_cores: int) -> None:
    """Check that each of these nodes can split its cores between prompts and decodes.

    Raises:
        ConfigError: they have fewer than two each, or would compute on GPUs.
    """
    for engine in engines:
        if engine.device not in ("auto", "cpu"):
            raise ConfigError(
                f"--mode multiplexed splits the cores of a CPU, and the nodes would compute on "
                f"{engine.device}: add --device cpu, or take another mode"
            )
    if num_cores < 2 * len(engines):
        raise ConfigError(
            f"--mode multiplexed splits the cores of each node, so each of {len(engines)} nodes "
            f"needs two or more, and there are {num_cores}: start fewer nodes, or take --mode "
            "colocated"
        )


def coordinator_cores(nodes: Sequence[CorePlan], cores: Sequence[int]) -> list[int]:
    """The cores of the coordinator, out of all `cores` of the cluster.

    If nodes keep their services off their compute cores, it runs where their services run, since a
    step takes as long as its slowest thread. Otherwise it may run anywhere: nobody knows better
    than the kernel which core is free, and a fixed one, even a prefill node's, is often busy.
    """
    spare = {core for node in nodes if node.has_spare_cores for core in node.service}
    return sorted(spare) or list(cores)


def gpus_of_node(engine: EngineConfig) -> int:
    """How many GPUs a node has on its first host: one for each rank of each stage, shared out."""
    num_hosts = 1 + len(engine.rank_hosts)
    return engine.tensor_parallel * (engine.pipeline_parallel or num_hosts) // num_hosts


def assign_device(device: str, index: int, num_gpus: int, num_ranks: int = 1) -> str:
    """The first device of node `index`, of which it has one a rank in a row.

    Nodes have GPUs in turn, unless the config names one.
    """
    if device in ("auto", "cuda") and num_gpus > 0:
        return f"cuda:{index % max(1, num_gpus // num_ranks) * num_ranks}"
    return device


def usable_cores(cpus: str) -> list[int]:
    """The cores that `cpus` names, or else all that this process may use.

    Raises:
        ConfigError: `cpus` names a core that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    wanted = sorted(set(parse_cpus(cpus)))
    unusable = [core for core in wanted if core not in allowed]
    if unusable:
        raise ConfigError(
            f"cpus {cpus}: this process may not use core {unusable[0]}, only {format_cpus(allowed)}"
        )
    return wanted or allowed


def has_mps() -> bool:
    """Whether CUDA's multi-process service runs: then nodes on one GPU compute at the same time."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # CUDA's own default
    return Path(pipes, "control").exists()


def count_gpus(signs: Sequence[Path] = GPU_SIGNS, program: str = _COUNT_GPUS) -> int:
    """The number of GPUs that torch can use; counted in a child, so torch is not loaded here.

    `program` prints it there.
    """
    if not any(sign.exists() for sign in signs):
        return 0
    command = [sys.executable, "-c", program]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=_COUNT_GPUS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0
    match = re.fullmatch(r"\s*(\d+)\s*", asked.stdout)
    return int(match[1]) if asked.returncode == 0 and match else 0
