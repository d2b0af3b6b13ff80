"""Steps on shared cores: each asks for its cores before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pdserve._native import CoreShare
from pdserve.engine.interface import Runner, Sampled
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Scheduled
from pdserve.node.split_cores.demand import CoreDemand


class SplitSteps:
    """A Runner that computes what another one does. The engine says when nothing is computed."""

    def __init__(self, runner: Runner, share: CoreShare, demand: CoreDemand) -> None:
        self.launcher = None  # the cores are not those of a device
        self.mean_cores = 0.0  # that the kernels of the last step had; 0: it needed none
        self._asked = 1  # by it
        self._runner = runner
        self._share = share
        self._demand = demand

    @property
    def model_s(self) -> float:
        """As Runner.model_s."""
        return self._runner.model_s

    @property
    def share(self) -> float:
        """The share of the node's cores that the last step had."""
        return self.mean_cores / self._share.num_cores

    def slowdown(self) -> float:
        """As Demand.slowdown, of the last step."""
        return self._demand.slowdown(self._asked, self.mean_cores)

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        """As Runner.prepare."""
        compute = self._runner.prepare(rows, progress)
        num_cores = self._demand.cores(rows)
        self._share.ask(num_cores)
        return partial(self._compute, compute, num_cores)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """As Runner.foresee."""
        self._runner.foresee(rows)

    def close(self) -> None:
        """Let go of what computes; nothing is computed any more."""
        del self._runner, self._share

    def _compute(self, compute: Callable[[], Sampled], num_cores: int) -> Sampled:
        sampled = compute()
        self._asked, self.mean_cores = num_cores, self._share.mean_cores
        return sampled
