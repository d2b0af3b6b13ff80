"""How many cores a node asks for while both of a pair compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.clock import Clock
from pdserve.core_rule import Slowdowns, cores_for_decodes
from pdserve.engine.due_times import step_limit_s
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.shape import shape_of
from pdserve.perf_model import PerfModel, StepShape


class Demand(Protocol):
    """Decides before each step."""

    def cores(self, rows: Sequence[Scheduled]) -> int:
        """Return how many cores this step needs."""
        ...

    def stepped(self, shape: StepShape, seconds: float, mean_cores: float) -> None:
        """Learn from a step that took so long on so many cores."""
        ...


class RestDemand:
    """The demand of a prefill node, which gets the rest whatever it asks for."""

    def cores(self, rows: Sequence[Scheduled]) -> int:
        """As Demand.cores."""
        return 1

    def stepped(self, shape: StepShape, seconds: float, mean_cores: float) -> None:
        """As Demand.stepped."""


class StreamDemand:
    """The demand of a decode node: what its streams need to keep their TPOT."""

    def __init__(
        self, perf: PerfModel, slowdowns: Slowdowns, num_cores: int, clock: Clock, tpot_s: float
    ) -> None:
        """
        Args:
            perf: what steps cost on all cores; corrected here, by steps on any number of them.
            slowdowns: what they cost on fewer.
            num_cores: of both nodes together.
            clock: the node's clock.
            tpot_s: aimed at for requests without a TPOT promise.
        """
        self._perf = perf
        self._slowdowns = slowdowns
        self._num_cores = num_cores
        self._clock = clock
        self._tpot_s = tpot_s

    def cores(self, rows: Sequence[Scheduled]) -> int:
        """As Demand.cores."""
        if self._num_cores == 2:
            return 1  # there is nothing to decide
        streams = [row.request for row in rows if row.request.is_decoding]
        limit_s = step_limit_s(streams, self._clock.now(), self._tpot_s)
        step_s, slowdown = self._perf.step_s(shape_of(rows)), self._slowdowns.at
        return cores_for_decodes(self._num_cores, lambda cores: step_s * slowdown(cores), limit_s)

    def stepped(self, shape: StepShape, seconds: float, mean_cores: float) -> None:
        """As Demand.stepped."""
        if mean_cores:
            self._perf.observe(shape, seconds / self._slowdowns.at(mean_cores))
