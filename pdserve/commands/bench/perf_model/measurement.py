"""The error of predicted step times, for steps that the profile has not measured.

There are three phases: prompts with and without a prefix, decodes, and both in one step. Every step
is measured several times, in turns with others of its phase, as a node would compute them; the
prediction is compared with the median.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.measured.perf_model import PerfModel, StepRow, StepShape
from pdserve.protocol import StepCosts

Step = tuple[StepRow, ...]

PHASES = ("prefill", "decode", "mixed")
NUM_WORST = 3  # steps of each phase that are reported
_DRAWS = 100  # attempts to draw an allowed step


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One held-out step."""

    phase: str
    step: Step
    first_s: float  # when computed for the first time
    median_s: float  # of the later times


class WorstPrediction(msgspec.Struct, frozen=True):
    """A step with a large prediction error."""

    tokens: int
    sampled: int
    prefill_pairs: int
    decode_context: int
    real_ms: float
    predicted_ms: float


class PhaseError(msgspec.Struct, frozen=True):
    """|predicted / real - 1| of a phase's steps.

    Given for the profile alone, and after the corrections that a node makes while it serves.
    """

    phase: str
    steps: int
    mape: float
    p90: float
    bias: float  # signed mean: above 0, predictions are too long
    corrected_mape: float
    corrected_p90: float
    first_time_ms: float  # how much longer a step takes when computed for the first time
    worst: list[WorstPrediction]


class PerfModelReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench perf-model`."""

    profile_s: float
    profile_error: float  # error for the steps of the profile itself
    saturating_tokens: int
    costs: StepCosts
    phases: list[PhaseError]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The distribution from which held-out steps are drawn."""

    token_budget: int
    max_batch_size: int
    longest: int  # most tokens of a request
    allow: Callable[[Step], bool]

    def draw(self, phase: str, rng: random.Random) -> Step | None:
        """Draw a step of a phase; None if none seems to be allowed."""
        for _ in range(_DRAWS):
            step = self._draw(phase, rng)
            if self.allow(step):
                return step
        return None

    def _draw(self, phase: str, rng: random.Random) -> Step:
        num_decodes = 0 if phase == "prefill" else rng.randint(1, self.max_batch_size)
        # Contexts within one step are similar, as in steps of one kind of load.
        most = rng.randint(1, self.longest)
        decodes = [StepRow(1, rng.randint(1, most), is_decoding=True) for _ in range(num_decodes)]
        if phase == "decode":
            return tuple(decodes)
        length = rng.randint(1, max(1, self.token_budget - num_decodes))
        before = rng.choice([0, rng.randint(0, max(0, self.longest - length))])
        return (*decodes, StepRow(length, before))


def measure_held_out(
    held_out: HeldOut,
    seconds: Callable[[Step], float],
    perf: PerfModel,
    num_steps: int,
    repeats: int,
    seed: int,
) -> list[MeasuredStep]:
    """Compute `num_steps` random steps of each phase, `repeats` times after the first.

    Args:
        held_out: the source of the steps.
        seconds: computes a step, and returns how long it took.
        perf: observes each time, and so is corrected as on a node that serves.
        num_steps: of each phase, if there are as many.
        repeats: at least 1.
        seed: of the steps and of their order.
    """
    rng = random.Random(seed)
    drawn = [(phase, held_out.draw(phase, rng)) for phase in PHASES for _ in range(num_steps)]
    steps = [(phase, step) for phase, step in drawn if step is not None]
    first = [seconds(step) for _, step in steps]
    times: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    for _ in range(repeats):
        rng.shuffle(order)
        for index in sorted(order, key=lambda index: PHASES.index(steps[index][0])):
            step = steps[index][1]
            times[index].append(seconds(step))
            perf.observe(StepShape.of(step), times[index][-1])
    return [
        MeasuredStep(phase, step, first[index], statistics.median(times[index]))
        for index, (phase, step) in enumerate(steps)
    ]


def phase_errors(
    measured: Sequence[MeasuredStep], profiled: PerfModel, corrected: PerfModel
) -> list[PhaseError]:
    """Return the errors of each measured phase."""
    of_phase = {phase: [m for m in measured if m.phase == phase] for phase in PHASES}
    return [_error_of(phase, some, profiled, corrected) for phase, some in of_phase.items() if some]


def _error_of(
    phase: str, measured: Sequence[MeasuredStep], profiled: PerfModel, corrected: PerfModel
) -> PhaseError:
    off = [_off(m, profiled) for m in measured]
    corrected_off = [abs(_off(m, corrected)) for m in measured]
    worst = sorted(measured, key=lambda m: -abs(_off(m, profiled)))[:NUM_WORST]
    return PhaseError(
        phase=phase,
        steps=len(measured),
        mape=statistics.fmean(map(abs, off)),
        p90=_p90([abs(error) for error in off]),
        bias=statistics.fmean(off),
        corrected_mape=statistics.fmean(corrected_off),
        corrected_p90=_p90(corrected_off),
        first_time_ms=1e3 * statistics.median(m.first_s - m.median_s for m in measured),
        worst=[_worst(m, profiled) for m in worst],
    )


def _off(measured: MeasuredStep, perf: PerfModel) -> float:
    return perf.step_s(StepShape.of(measured.step)) / measured.median_s - 1


def _p90(errors: Sequence[float]) -> float:
    return sorted(errors)[int(0.9 * (len(errors) - 1))]


def _worst(measured: MeasuredStep, perf: PerfModel) -> WorstPrediction:
    shape = StepShape.of(measured.step)
    return WorstPrediction(
        tokens=shape.num_tokens,
        sampled=shape.num_sampled,
        prefill_pairs=shape.prefill_pairs,
        decode_context=shape.decode_context,
        real_ms=1e3 * measured.median_s,
        predicted_ms=1e3 * perf.step_s(shape),
    )
