"""What steps and pulls really take: calibrated costs, times a ratio drawn from the residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Literal, Protocol, get_args

from pdserve.measured.calibration import Region, Residuals
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts

REGIONS: Final[tuple[Region, ...]] = get_args(Region)

Timed = Literal["prefill", "decode", "mixed", "pull", "prompt_beside", "decode_beside"]


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
    """Replays stretches of measured residuals; where there are none, times are as predicted."""

    def __init__(self, residuals: Residuals, seed: str) -> None:
        self._stretches: dict[Timed, Sequence[Sequence[float]]] = {
            "prefill": residuals.prefill,
            "decode": residuals.decode,
            "mixed": residuals.mixed,
            "pull": residuals.pull,
            "prompt_beside": residuals.prompt_beside or residuals.prefill,
            "decode_beside": residuals.decode_beside or residuals.decode,
        }
        self._randoms = {timed: Random(f"{seed} {timed}") for timed in self._stretches}
        self._ahead: dict[Timed, list[float]] = {timed: [] for timed in self._stretches}  # stacks

    def draw(self, timed: Timed) -> float:
        """As Scatter.draw."""
        (factor,) = self.draws(timed, 1)
        return factor

    def draws(self, timed: Timed, count: int) -> list[float]:
        """As Scatter.draws."""
        stretches = self._stretches[timed]
        if not stretches:
            return [1.0] * count
        ahead, random = self._ahead[timed], self._randoms[timed]
        factors: list[float] = []
        while len(factors) < count:
            if not ahead:
                ahead.extend(reversed(random.choice(stretches)))
            num_taken = min(count - len(factors), len(ahead))
            factors += ahead[: -num_taken - 1 : -1]
            del ahead[-num_taken:]
        return factors

    def give_back(self, timed: Timed, factors: Sequence[float]) -> None:
        """As Scatter.give_back."""
        if self._stretches[timed]:
            self._ahead[timed].extend(reversed(factors))


NO_SCATTER: Final = NoScatter()


def region_of(shape: StepShape) -> Region:
    """Return the kind of a step."""
    if not shape.prefill_pairs:
        return "decode"
    return "mixed" if shape.decode_context else "prefill"


def timed_as(shape: StepShape, *, decodes: bool) -> Region:
    """Return as which kind of steps one takes its time.

    Nodes that do not decode hand their prompts off, and do much for that during steps.
    """
    region = region_of(shape)
    return "mixed" if region == "prefill" and decodes else region


class StepTimes:
    """The seconds of one node's steps."""

    def __init__(
        self,
        costs: Mapping[Region, StepCosts],
        scatter: Scatter = NO_SCATTER,
        *,
        decodes: bool = True,
    ) -> None:
        """`decodes`: as `timed_as`."""
        self.scatter = scatter
        self._decodes = decodes
        self._models: dict[Region, PerfModel] = {
            region: PerfModel(of_region) for region, of_region in costs.items()
        }

    def expected_s(self, shape: StepShape) -> float:
        """Return the mean seconds of such a step alone on its host."""
        return self._models[timed_as(shape, decodes=self._decodes)].step_s(shape)

    def draw_s(self, shape: StepShape, *, beside: bool = False) -> float:
        """Return the next step's seconds.

        Args:
            shape: of the step.
            beside: whether another node of its host computes; its mean is the same.
        """
        timed: Timed = timed_as(shape, decodes=self._decodes)
        if beside:
            timed = "decode_beside" if shape.is_decode else "prompt_beside"
        return self.expected_s(shape) * self.scatter.draw(timed)

    def draw_decodes_s(self, shape: StepShape, num_steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds of steps that decode the same requests, and the factors of each.

        Arguments as for `PerfModel.decode_steps_s`.
        """
        factors = self.scatter.draws("decode", num_steps)
        expected_s = self._models["decode"].decode_steps_s(shape, num_steps)
        return [s * factor for s, factor in zip(expected_s, factors, strict=True)], factors
