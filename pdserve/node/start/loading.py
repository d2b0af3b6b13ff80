"""Loads a node's weights and profiles its steps, in the thread that will compute them."""

from __future__ import annotations

import logging
from contextlib import nullcontext

from kv_transfer.memory import KvPool
from pdserve.core_rule import Slowdowns
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import RequestCancelled
from pdserve.node.memory.kv_memory import engine_buffer
from pdserve.node.profiling.costs import KnownCosts, step_costs, step_limits
from pdserve.node.profiling.slowdowns import measure_slowdowns
from pdserve.node.split_cores.pair import CorePair
from pdserve.node.start.cores import CorePlan, use_compute_cores
from pdserve.node.start.model import NodeModel, RankLoader, load_runner, packed_cache
from pdserve.settings.config import NodeConfig

log = logging.getLogger(__name__)


class Loading:
    """The loading of one model; the event loop reads its progress, and may abandon it."""

    def __init__(
        self,
        config: NodeConfig,
        cores: CorePlan,
        model: NodeModel,
        memory: KvPool,
        ranks: RankLoader | None = None,
        pair: CorePair | None = None,
    ) -> None:
        """With `pair`, the node shares its cores."""
        self.progress = 0.0  # share of the weights that are loaded; heartbeats report it
        self._is_abandoned = False
        self._config = config
        self._cores = cores
        self._model = model
        self._memory = memory
        self._ranks = ranks
        self._pair = pair
        self.slowdowns: Slowdowns | None = None  # of a decode node that shares its cores

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
            packed_cache(config.engine, config.timeouts),
            self._ranks,
        )
        check = self._check_wanted
        with nullcontext(True) if self._pair is None else self._pair.turn(check) as has_turn:
            if not has_turn:
                log.warning("the other node is still being profiled: both are now, so not well")
            costs = step_costs(config.profile, config.engine, self._model, runner, check)
            if self._pair is not None and not self._pair.takes_rest:
                self.slowdowns = self._slowdowns(runner, self._pair.num_cores)
        return runner, costs

    def _slowdowns(self, runner: ModelRunner, num_cores: int) -> Slowdowns:
        if self._config.profile.profile == "off":
            return Slowdowns.proportional(num_cores)
        limits = step_limits(self._config.engine, self._model)
        return measure_slowdowns(limits, runner, num_cores, self._check_wanted)

    def _set_progress(self, fraction: float) -> None:
        """Called after each tensor."""
        self._check_wanted()
        self.progress = fraction

    def _check_wanted(self) -> None:
        if self._is_abandoned:
            raise RequestCancelled("the node was stopped while it was loading")
