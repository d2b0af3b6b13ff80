"""Loads a node's weights and profiles its steps, in the thread that will compute them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kv_transfer.memory import KvPool
from pdserve.engine.drafts.heads.head import Head
from pdserve.engine.drafts.model.draft_model import DraftModel
from pdserve.engine.model_runner import ModelRunner
from pdserve.node.memory.kv_memory import engine_buffer
from pdserve.node.profiling.costs import KnownCosts, step_costs, step_limits
from pdserve.node.profiling.slowdowns import measure_slowdowns
from pdserve.node.start.cores import CorePlan, use_compute_cores
from pdserve.node.start.draft import load_draft
from pdserve.node.start.model import NodeModel, RankLoader, load_runner, packed_cache
from pdserve.rules.cores import Slowdowns
from pdserve.settings.config import NodeConfig
from pdserve.shared.errors import RequestCancelled


class Loading:
    """The loading of one model; the event loop reads its progress, and may abandon it."""

    def __init__(
        self,
        config: NodeConfig,
        cores: CorePlan,
        model: NodeModel,
        memory: KvPool,
        ranks: RankLoader | None = None,
        *,
        wakes: bool = False,
    ) -> None:
        """`wakes`: the node was one of another model, and requests wait."""
        self.progress = 0.0  # share of the weights that are loaded; heartbeats report it
        self._is_abandoned = False
        self._config = config
        self._cores = cores
        self._model = model
        self._memory = memory
        self._ranks = ranks
        self._wakes = wakes
        self.draft: DraftModel | Head | None = None  # if there is to be one
        self.slowdowns: Slowdowns | None = None  # of a node whose phases share its cores
        # Called before each step that is measured, with what raises if none is wanted any more.
        self.before_step: Callable[[Callable[[], None]], None] = lambda check_wanted: check_wanted()

    def abandon(self) -> None:
        """Make `run` raise at the next tensor, or at the next profiled step."""
        self._is_abandoned = True

    def run(self) -> tuple[ModelRunner, KnownCosts]:
        """Load and profile. The kernels' workers start in this thread, and inherit its cores.

        Raises:
            ModelError: the weights cannot be used.
            NodeSick: another rank has ended.
            RequestCancelled: it was abandoned.
        """
        config = self._config
        use_compute_cores(self._cores.of_rank(0, self._model.share.num_ranks))
        runner = load_runner(
            self._model,
            engine_buffer(self._memory),
            self._set_progress,
            packed_cache(config.engine),
            self._ranks,
            is_awaited=self._wakes,
        )
        before = partial(self.before_step, self.check_wanted)
        costs = step_costs(
            config.profile,
            config.engine,
            self._model,
            runner,
            before,
            is_awaited=self._wakes,
        )
        if self._model.draft is not None:
            self.draft = load_draft(self._model, self._model.draft, config, before)
        if config.multiplexed:
            self.slowdowns = self._slowdowns(runner, len(self._cores.compute))
        return runner, costs

    def _slowdowns(self, runner: ModelRunner, num_cores: int) -> Slowdowns:
        if self._config.profile.profile == "off":
            return Slowdowns.proportional(num_cores)
        limits = step_limits(self._config.engine, self._model)
        return measure_slowdowns(limits, runner, num_cores, self.check_wanted)

    def _set_progress(self, fraction: float) -> None:
        """Called after each tensor."""
        self.check_wanted()
        self.progress = fraction

    def check_wanted(self) -> None:
        """Raise RequestCancelled: it was abandoned."""
        if self._is_abandoned:
            raise RequestCancelled("the node was stopped while it was loading")
