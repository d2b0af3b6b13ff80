"""From a node's config to its side of a pair."""

from __future__ import annotations

from pdserve.core_rule import Slowdowns
from pdserve.engine.interface import Runner
from pdserve.errors import ConfigError
from pdserve.node.roles import NodeParts
from pdserve.node.split_cores.demand import RestDemand, StreamDemand
from pdserve.node.split_cores.pair import CorePair
from pdserve.node.split_cores.steps import SplitSteps
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.perf_model import PerfModel
from pdserve.protocol import NodeRole, StepCosts
from pdserve.settings.config import NodeConfig


def open_pair(
    config: NodeConfig, role: NodeRole, cores: CorePlan, model: NodeModel
) -> CorePair | None:
    """Join the pair that the config names; None: the cores are the node's own.

    Raises:
        ConfigError: cores cannot be shared by this node, or not through this memory.
    """
    path = config.shared_cores
    if not path:
        return None
    if model.device.type != "cpu":
        raise ConfigError(
            f"shared_cores {path}: two processes can split the cores of a CPU, not those of "
            f"{model.device}: leave it out, or ask for device cpu"
        )
    if not model.share.is_alone:
        raise ConfigError(
            f"shared_cores {path}: a node of {model.share.num_ranks} ranks has its cores to "
            "itself: leave it out, or tensor_parallel, pipeline_parallel and rank_hosts"
        )
    num_cores = len(cores.compute)
    if num_cores < 2 or cores.num_threads != num_cores:
        raise ConfigError(
            f"shared_cores {path}: two or more cores can be split, and one thread on each: this "
            f"node has {cores.num_threads} threads on {num_cores} cores"
        )
    return CorePair(path, role, num_cores)


def split_steps(
    runner: Runner, pair: CorePair, parts: NodeParts, costs: StepCosts, slowdowns: Slowdowns | None
) -> SplitSteps:
    """Return the runner whose steps ask for cores; a prefill node has no `slowdowns`."""
    if slowdowns is None:
        return SplitSteps(runner, pair, RestDemand())
    tpot_s = parts.config.policy.default_tpot_s
    perf = PerfModel(costs)
    demand = StreamDemand(perf, slowdowns, pair.num_cores, parts.clock, tpot_s)
    return SplitSteps(runner, pair, demand)
