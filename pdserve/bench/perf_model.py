"""How well predicted step times fit steps that the profile has not seen.

Three phases: prompts with and without a prefix, decodes, and both in one step. Every step is
measured several times, in turns with others of its phase, as a node would compute them; what is
predicted is compared with the median.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.perf_model import PerfModel, StepRow, StepShape
from pdserve.protocol import StepCosts

Step = tuple[StepRow, ...]

PHASES = ("prefill", "decode", "mixed")
NUM_WORST = 3  # of each phase, to be looked at
_DRAWS = 100  # until one is allowed


@dataclass(frozen=True, slots=True)
class Measured:
    """One held-out step."""

    phase: str
    step: Step
    first_s: float  # the first time ever
    median_s: float  # of the other times


class WorstStep(msgspec.Struct, frozen=True):
    """One that is predicted badly."""

    tokens: int
    sampled: int
    prefill_pairs: int
    decode_context: int
    real_ms: float
    predicted_ms: float


class PhaseError(msgspec.Struct, frozen=True):
    """|predicted / real - 1| of a phase's steps: the profile's alone, and after the correction that
    a node makes while it serves."""

    phase: str
    steps: int
    mape: float
    p90: float
    bias: float  # the mean with its sign: above 0, too long is predicted
    corrected_mape: float
    corrected_p90: float
    first_time_ms: float  # how much longer a step takes that is computed for the first time
    worst: list[WorstStep]


class PerfModelReport(msgspec.Struct, frozen=True):
    """What `pdserve bench perf-model` found."""

    profile_s: float
    profile_error: float  # for the steps that were measured for it
    saturating_tokens: int
    costs: StepCosts
    phases: list[PhaseError]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Where random steps are drawn from."""

    token_budget: int
    max_batch_size: int
    longest: int  # tokens of a request
    allow: Callable[[Step], bool]

    def draw(self, phase: str, rng: random.Random) -> Step | None:
        """A step of a phase; None: there seem to be none."""
        for _ in range(_DRAWS):
            step = self._draw(phase, rng)
            if self.allow(step):
                return step
        return None

    def _draw(self, phase: str, rng: random.Random) -> Step:
        num_decodes = 0 if phase == "prefill" else rng.randint(1, self.max_batch_size)
        # Contexts within one step are alike, as are steps of one kind of load.
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
) -> list[Measured]:
    """Compute `num_steps` random steps of each phase, `repeats` times after the first.

    Args:
        held_out: where they come from.
        seconds: computes a step, and says how long it took.
        perf: is told of each time, and so corrected as on a node that serves.
        num_steps: of each phase, as far as there are any.
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
        Measured(phase, step, first[index], statistics.median(times[index]))
        for index, (phase, step) in enumerate(steps)
    ]


def phase_errors(
    measured: Sequence[Measured], profiled: PerfModel, corrected: PerfModel
) -> list[PhaseError]:
    """Of each phase that there is."""
    of_phase = {phase: [m for m in measured if m.phase == phase] for phase in PHASES}
    return [_error_of(phase, some, profiled, corrected) for phase, some in of_phase.items() if some]


def _error_of(
    phase: str, measured: Sequence[Measured], profiled: PerfModel, corrected: PerfModel
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


def _off(measured: Measured, perf: PerfModel) -> float:
    return perf.step_s(StepShape.of(measured.step)) / measured.median_s - 1


def _p90(errors: Sequence[float]) -> float:
    return sorted(errors)[int(0.9 * (len(errors) - 1))]


def _worst(measured: Measured, perf: PerfModel) -> WorstStep:
    shape = StepShape.of(measured.step)
    return WorstStep(
        tokens=shape.num_tokens,
        sampled=shape.num_sampled,
        prefill_pairs=shape.prefill_pairs,
        decode_context=shape.decode_context,
        real_ms=1e3 * measured.median_s,
        predicted_ms=1e3 * perf.step_s(shape),
    )
