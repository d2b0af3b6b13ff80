"""Steps on shared cores: each asks for its cores before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.engine.interface import Runner, Sampled
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.shape import shape_of
from pdserve.node.split_cores.demand import Demand
from pdserve.node.split_cores.pair import CorePair
from pdserve.perf_model import StepShape


class SplitSteps:
    """A Runner that computes what another one does. The engine says when nothing is computed."""

    def __init__(self, runner: Runner, pair: CorePair, demand: Demand) -> None:
        self.launcher = None  # the cores are not those of a device
        self._runner = runner
        self._pair = pair
        self._demand = demand

    @property
    def model_s(self) -> float:
        """As Runner.model_s."""
        return self._runner.model_s

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        """As Runner.prepare."""
        compute = self._runner.prepare(rows, progress)
        self._pair.ask(self._demand.cores(rows))
        return partial(self._compute, compute, shape_of(rows))

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """As Runner.foresee."""
        self._runner.foresee(rows)

    def _compute(self, compute: Callable[[], Sampled], shape: StepShape) -> Sampled:
        began_s = time.perf_counter()
        sampled = compute()
        self._demand.stepped(shape, time.perf_counter() - began_s, self._pair.step_ended())
        return sampled
