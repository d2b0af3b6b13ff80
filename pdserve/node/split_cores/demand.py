"""How many cores a step asks for while the other phase computes, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from pdserve.engine.interface import shape_of
from pdserve.engine.request import Scheduled, step_limit_s
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts
from pdserve.rules.cores import Slowdowns, cores_for_decodes
from pdserve.shared.clock import Clock

_ONE = StepShape(1)
_ONE_S: Final = StepCosts(knot_tokens=[1], knot_s=[1.0])


class CoreDemand(Protocol):
    """Decides before each step."""

    def cores(self, rows: Sequence[Scheduled]) -> int:
        """Return how many cores this step needs."""
        ...

    def slowdown(self, asked: int, mean_cores: float) -> float:
        """Return by which factor a step took longer than is to be predicted.

        Called once for each step, before the performance model learns from it.

        Args:
            asked: the cores that it asked for.
            mean_cores: those that it had, on average; 0: nothing was computed.
        """
        ...


class RestDemand:
    """The demand of prompts, which get the rest: how long they take with that is predicted."""

    def cores(self, rows: Sequence[Scheduled]) -> int:
        """As Demand.cores."""
        return 1

    def slowdown(self, asked: int, mean_cores: float) -> float:
        """As Demand.slowdown."""
        return 1.0


class StreamDemand:
    """The demand of decodes: what their streams need to keep their TPOT.

    They can have all cores but one, and all while there are no prompts. So their steps are
    predicted as if they always asked for that: whether there is a place for another stream must not
    depend on how few cores do at the moment.
    """

    def __init__(
        self, perf: PerfModel, slowdowns: Slowdowns, num_cores: int, clock: Clock, tpot_s: float
    ) -> None:
        """
        Args:
            perf: of the node; corrected by steps without their `slowdown`.
            slowdowns: what steps cost on fewer cores.
            num_cores: of both phases together.
            clock: the node's clock.
            tpot_s: aimed at for requests without a TPOT promise.
        """
        self._perf = perf
        self._slowdowns = slowdowns
        self._num_cores = num_cores
        self._clock = clock
        self._tpot_s = tpot_s
        # How much longer steps took than on all cores, beside as many prompts as those that `perf`
        # has learned its ratio from. It is averaged by the same rule, so that the two fit.
        self._beside = PerfModel(_ONE_S, decode_ratio=slowdowns.at(num_cores - 1))

    def cores(self, rows: Sequence[Scheduled]) -> int:
        """As Demand.cores."""
        if self._num_cores == 2:
            return 1  # there is nothing to decide
        streams = [row.request for row in rows]
        limit_s = step_limit_s(streams, self._clock.now(), self._tpot_s)
        alone_s = self._perf.step_s(shape_of(rows)) / self._beside.decode_ratio
        return cores_for_decodes(
            self._num_cores, lambda cores: alone_s * self._slowdowns.at(cores), limit_s
        )

    def slowdown(self, asked: int, mean_cores: float) -> float:
        """As Demand.slowdown."""
        if not mean_cores:
            return 1.0
        beside = (self._num_cores - mean_cores) / (self._num_cores - asked)  # share of the step
        predicted = self._slowdowns.at(self._num_cores - beside)
        self._beside.observe(_ONE, predicted)
        return self._slowdowns.at(mean_cores) / predicted
