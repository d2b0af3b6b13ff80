"""The two phases of a multiplexed node: an engine each, over the same requests and blocks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple

from pdserve import _native
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.interface import StepObserver, StepReport
from pdserve.engine.model_runner import ModelRunner
from pdserve.node.roles import NodeParts
from pdserve.node.split_cores.demand import RestDemand, StreamDemand
from pdserve.node.split_cores.steps import SplitSteps
from pdserve.node.start.cores import CorePlan, use_compute_cores
from pdserve.node.start.model import WARMUP_TOKENS, NodeModel
from pdserve.protocol import NodeRole
from pdserve.rules.cores import Slowdowns
from pdserve.settings.config import NodeConfig
from pdserve.shared.errors import ConfigError


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


class _Phase(NamedTuple):
    """One of the two."""

    engine: Engine
    share: _native.CoreShare
    runner: ModelRunner
    steps: SplitSteps


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
        beside = runner.beside(GrammarProgress(num_cores))
        self.decodes = SplitSteps(runner, asking, streams)
        self.prompts = SplitSteps(beside, resting, RestDemand())
        self._phases = [
            _Phase(parts.engine, asking, runner, self.decodes),
            _Phase(prompt_engine, resting, beside, self.prompts),
        ]
        parts.perf.decode_ratio = slowdowns.at(num_cores - 1)  # until there was a step

    async def load(self) -> None:
        """Start the threads, and warm up what they compute with: workers start with a first job."""
        num_tokens = min(WARMUP_TOKENS, self._max_model_len)
        for engine, share, runner, _ in self._phases:
            engine.on_idle = share.release
            await engine.in_thread(partial(_use, self._cores, share))
            await engine.in_thread(partial(runner.warmup, num_tokens))

    def last_steps(self, report: StepReport) -> SplitSteps:
        """Return what computed a step, and knows what it had.

        That is of the last step of this phase. If its report was deferred, that may be the one
        after it, which hardly differs.
        """
        return self.prompts if report.of_prompts else self.decodes

    def alone_s(self, report: StepReport) -> float | None:
        """Return the seconds that a step would have taken on all cores, which are predicted.

        None: that says nothing of its kind.
        """
        if report.of_prompts and report.shape.is_decode:
            return None  # prompts that came back and lack one token: no decodes, on other cores
        return report.period_s / self.last_steps(report).slowdown()

    async def run(self, observer: StepObserver) -> None:
        """Run both loops until cancelled.

        If one fails, so does this, at once: the other one's step may be one that never ends. That
        loop ends with its step.

        Raises:
            NodeSick: as Engine.run.
        """
        loops = [engine.run(steps, observer) for engine, _, _, steps in self._phases]
        try:
            await asyncio.gather(*loops)
        finally:
            for phase in self._phases:
                phase.engine.stop()

    def close(self) -> None:
        """Let go of what is native: cycles would have it when the process ends."""
        for phase in self._phases:
            phase.engine.on_idle = lambda: None
        self._phases.clear()
        self.decodes.close()
        self.prompts.close()


def _use(cores: CorePlan, share: _native.CoreShare) -> None:
    use_compute_cores(cores)
    _native.use_core_share(share)
