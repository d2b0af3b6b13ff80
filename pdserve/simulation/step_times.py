"""What steps and pulls really take: calibrated costs, times a ratio drawn from the residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Literal, Protocol

from pdserve.measured.calibration import Region, Residuals
from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts

Timed = Literal["prefill", "decode", "mixed", "pull"]


class Scatter(Protocol):
    """Draws by which factor a time differs from its prediction.

    Each kind of times has random numbers of its own, so drawing some of one kind ahead of time
    changes nothing for the others.
    """

    def draw(self, timed: Timed) -> float:
        """Return the next factor for this kind."""
        ...

    def draws(self, timed: Timed, count: int) -> list[float]:
        """Return the next `count` factors for this kind."""
        ...

    def give_back(self, timed: Timed, factors: Sequence[float]) -> None:
        """Return the factors drawn last, in the order in which they were drawn."""
        ...


class NoScatter:
    """Every time is as predicted."""

    def draw(self, timed: Timed) -> float:
        """As Scatter.draw."""
        return 1.0

    def draws(self, timed: Timed, count: int) -> list[float]:
        """As Scatter.draws."""
        return [1.0] * count

    def give_back(self, timed: Timed, factors: Sequence[float]) -> None:
        """As Scatter.give_back."""


class ResidualScatter:
    """Draws from measured residuals; where there are none, times are as predicted."""

    def __init__(self, residuals: Residuals, seed: str) -> None:
        self._ratios: dict[Timed, Sequence[float]] = {
            "prefill": residuals.prefill or (1.0,),
            "decode": residuals.decode or (1.0,),
            "mixed": residuals.mixed or (1.0,),
            "pull": residuals.pull or (1.0,),
        }
        self._randoms = {timed: Random(f"{seed} {timed}") for timed in self._ratios}
        self._ahead: dict[Timed, list[float]] = {timed: [] for timed in self._ratios}  # stacks

    def draw(self, timed: Timed) -> float:
        """As Scatter.draw."""
        (factor,) = self.draws(timed, 1)
        return factor

    def draws(self, timed: Timed, count: int) -> list[float]:
        """As Scatter.draws."""
        ahead, ratios, random = self._ahead[timed], self._ratios[timed], self._randoms[timed].random
        num_ratios = len(ratios)
        if num_ratios == 1:
            return [ratios[0]] * count
        num_ahead = min(count, len(ahead))
        factors = [ahead.pop() for _ in range(num_ahead)]
        return factors + [ratios[int(random() * num_ratios)] for _ in range(count - num_ahead)]

    def give_back(self, timed: Timed, factors: Sequence[float]) -> None:
        """As Scatter.give_back."""
        if len(self._ratios[timed]) > 1:
            self._ahead[timed].extend(reversed(factors))


NO_SCATTER: Final = NoScatter()


class StepTimes:
    """The seconds of one node's steps."""

    def __init__(self, costs: Mapping[Region, StepCosts], scatter: Scatter = NO_SCATTER) -> None:
        self.scatter = scatter
        self._models: dict[Region, PerfModel] = {
            region: PerfModel(of_region) for region, of_region in costs.items()
        }

    def draw_s(self, shape: StepShape) -> float:
        """Return the next step's seconds."""
        region: Region = "decode"
        if shape.prefill_pairs:
            region = "mixed" if shape.decode_context else "prefill"
        return self._models[region].step_s(shape) * self.scatter.draw(region)

    def draw_decodes_s(self, shape: StepShape, num_steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds of steps that decode the same requests, and the factors of each.

        Arguments as for `PerfModel.decode_steps_s`.
        """
        factors = self.scatter.draws("decode", num_steps)
        expected_s = self._models["decode"].decode_steps_s(shape, num_steps)
        return [s * factor for s, factor in zip(expected_s, factors, strict=True)], factors
