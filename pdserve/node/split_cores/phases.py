"""The two phases of a multiplexed node: an engine each, over the same requests and blocks."""

from __future__ import annotations

import asyncio
from functools import partial

from pdserve import _native
from pdserve.core_rule import Slowdowns
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.interface import StepObserver
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import ConfigError
from pdserve.node.roles import NodeParts
from pdserve.node.split_cores.demand import RestDemand, StreamDemand
from pdserve.node.split_cores.steps import SplitSteps
from pdserve.node.start.cores import CorePlan, use_compute_cores
from pdserve.node.start.model import WARMUP_TOKENS, NodeModel
from pdserve.perf_model import StepShape
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig


def check_splits(config: NodeConfig, role: NodeRole, cores: CorePlan, model: NodeModel) -> None:
    """Check that a node's cores can be split, if they are to be.

    Raises:
        ConfigError: they cannot.
    """
    if not config.multiplexed:
        return
    if role is NodeRole.PREFILL:
        raise ConfigError("multiplexed: for decode nodes, which then compute their prompts beside")
    if model.device.type != "cpu":
        raise ConfigError(
            f"multiplexed: the cores of a CPU can be split, not those of {model.device}: leave it "
            "out, or ask for device cpu"
        )
    if not model.share.is_alone:
        raise ConfigError(
            f"multiplexed: not with {model.share.num_ranks} ranks: leave it out, or "
            "tensor_parallel, pipeline_parallel and rank_hosts"
        )
    num_cores = len(cores.compute)
    if num_cores < 2 or cores.num_threads != num_cores:
        raise ConfigError(
            "multiplexed: two or more cores can be split, and one thread on each: this node has "
            f"{cores.num_threads} threads on {num_cores} cores"
        )


class Phases:
    """Runs both engines of a node, each with workers of its own on their share of the cores."""

    def __init__(
        self,
        parts: NodeParts,
        prompt_engine: Engine,
        cores: CorePlan,
        runner: ModelRunner,
        slowdowns: Slowdowns,
    ) -> None:
        """`slowdowns`: what decode steps cost on some of the cores."""
        num_cores = len(cores.compute)
        asking, resting = _native.split_cores(num_cores)
        tpot_s = parts.config.policy.default_tpot_s
        streams = StreamDemand(parts.perf, slowdowns, num_cores, parts.clock, tpot_s)
        self._cores = cores
        self._max_model_len = parts.max_model_len
        self._engines = {parts.engine: asking, prompt_engine: resting}
        self._beside = runner.beside(GrammarProgress(num_cores))
        self.decodes = SplitSteps(runner, asking, streams)
        self.prompts = SplitSteps(self._beside, resting, RestDemand())
        parts.perf.decode_ratio = slowdowns.at(num_cores - 1)  # until there was a step

    async def load(self) -> None:
        """Start the threads, with their workers, and warm up what computes prompts."""
        for engine, share in self._engines.items():
            engine.on_idle = share.release
            await engine.in_thread(partial(_use, self._cores, share))
        num_tokens = min(WARMUP_TOKENS, self._max_model_len)
        await engine.in_thread(partial(self._beside.warmup, num_tokens))

    def slowdown(self, shape: StepShape) -> float:
        """Return by which factor a step took longer than is to be predicted for it.

        It is the last one of its phase. If its report was deferred, that may be the one after it,
        which hardly differs.
        """
        return (self.decodes if shape.is_decode else self.prompts).slowdown

    async def run(self, observer: StepObserver) -> None:
        """Run both loops until cancelled. Raises as Engine.run."""
        steps = (self.decodes, self.prompts)
        runs = [e.run(s, observer) for e, s in zip(self._engines, steps, strict=True)]
        await asyncio.gather(*runs)

    def close(self) -> None:
        """Let go of what is native: cycles would have it when the process ends."""
        for engine in self._engines:
            engine.on_idle = lambda: None
        self._engines.clear()
        del self._beside
        self.decodes.close()
        self.prompts.close()


def _use(cores: CorePlan, share: _native.CoreShare) -> None:
    use_compute_cores(cores)
    _native.use_core_share(share)
