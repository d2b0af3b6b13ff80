"""From what nodes measured to a calibration: costs by kind of step, and how wrong they are.

Half of the measurements are fitted, the other half, of other requests, says how good the fit is.
Steps that ran beside those of another node of the host are kept apart: they say what the nodes cost
each other.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal

import numpy as np

from pdserve.errors import CalibrationError
from pdserve.measured.calibration import (
    Calibration,
    HeldOutErrors,
    Overheads,
    Range,
    Ranges,
    Region,
    Residuals,
    Sharing,
)
from pdserve.measured.samples import NodeKind, PullSample, StepSample
from pdserve.node.profiling.fit import fit_costs, non_negative_least_squares
from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts, TransferCosts
from pdserve.simulation.calibrate.drive import Idle
from pdserve.simulation.calibrate.samples import Recording

Beside = Literal["nothing", "decode", "prompt"]
REGIONS: Final[tuple[Region, ...]] = ("prefill", "decode", "mixed")

_LEAST = 30  # measurements of a kind, to fit it apart from the others
_ALIKE = 40  # measurements of steps with as many tokens, beyond which more say nothing new
_MOST_RESIDUALS = 400  # kept of each kind
_OVERLAP = 0.5  # share of a step during which another node computed, to count as beside it
_MOST_BYTES_PER_S = 1e13


@dataclass(slots=True)
class Measured:
    """Everything that was measured of one kind of node."""

    kind: NodeKind
    fitted: Recording = field(default_factory=Recording)
    held_out: Recording = field(default_factory=Recording)
    handed_off: list[Idle] = field(default_factory=list)  # requests of an idle cluster
    on_one_node: list[Idle] = field(default_factory=list)
    prompt_lengths: set[int] = field(default_factory=set)
    contexts: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Steps by their kind, and by what the host did meanwhile."""

    steps: dict[tuple[Region, Beside], list[StepSample]]

    def alone(self, region: Region) -> list[StepSample]:
        return self.steps.get((region, "nothing"), [])


def calibrate(measured: Measured, date: str, seed: int) -> Calibration:
    """Fit the costs, and judge them.

    Raises:
        CalibrationError: hardly anything was measured.
    """
    rng = random.Random(seed)
    fitted, held_out = _sort(measured.fitted), _sort(measured.held_out)
    everything = list(chain.from_iterable(fitted.alone(region) for region in REGIONS))
    if len(everything) < _LEAST:
        raise CalibrationError(
            f"only {len(everything)} steps were measured without neighbours: give more --budget-s, "
            "and a cluster that nobody uses"
        )
    costs = {region: _costs(fitted.alone(region), everything, rng) for region in REGIONS}
    found = {region: _Found.of(costs[region], held_out.alone(region)) for region in REGIONS}
    pull, pulls = _pull(measured.fitted.pulls, measured.held_out.pulls)
    kind = measured.kind
    calibration = Calibration(
        date=date,
        device=kind.device,
        cpus=kind.cpus,
        model=kind.model,
        shape=kind.shape,
        limits=kind.limits,
        tensor_parallel=kind.tensor_parallel,
        pipeline_parallel=kind.pipeline_parallel,
        quantisation=kind.quantisation,
        prefill=costs["prefill"],
        decode=costs["decode"],
        mixed=costs["mixed"],
        pull=pull,
        residuals=Residuals(
            prefill=found["prefill"].some(rng),
            decode=found["decode"].some(rng),
            mixed=found["mixed"].some(rng),
            pull=pulls.some(rng),
        ),
        ranges=_ranges(measured, fitted, held_out),
        errors=HeldOutErrors(
            prefill=found["prefill"].error,
            decode=found["decode"].error,
            mixed=found["mixed"].error,
            pull=pulls.error,
        ),
        host=_sharing(kind.host_cores, costs, fitted),
        overheads=_overheads(measured, costs, pull),
    )
    calibration.check()
    return calibration


# ---- steps ---------------------------------------------------------------------------------------


def _costs(
    steps: Sequence[StepSample], everything: Sequence[StepSample], rng: random.Random
) -> StepCosts:
    """Fit one kind of steps; if there are hardly any, all kinds together, as nodes do."""
    chosen = _varied(steps if len(steps) >= _LEAST else everything, rng)
    return fit_costs([(step.shape, step.period_s) for step in chosen])


def _varied(steps: Iterable[StepSample], rng: random.Random) -> list[StepSample]:
    """Return steps of all sizes, a few of each: small batches take more steps a second."""
    alike: dict[int, list[StepSample]] = defaultdict(list)
    for step in steps:
        alike[step.tokens].append(step)
    return [step for some in alike.values() for step in rng.sample(some, min(_ALIKE, len(some)))]


@dataclass(frozen=True, slots=True)
class _Found:
    """Predictions beside what was measured, in seconds."""

    predicted_s: list[float]
    measured_s: list[float]

    @classmethod
    def of(cls, costs: StepCosts, steps: Sequence[StepSample]) -> _Found:
        perf = PerfModel(costs)
        return cls([perf.step_s(step.shape) for step in steps], [step.period_s for step in steps])

    @property
    def error(self) -> float | None:
        """Mean of |predicted / measured - 1|; None: nothing was measured."""
        pairs = list(zip(self.predicted_s, self.measured_s, strict=True))
        return statistics.fmean(abs(p / m - 1) for p, m in pairs) if pairs else None

    @property
    def slower(self) -> float | None:
        """By which factor all of it took longer than predicted; None: hardly anything did."""
        if len(self.measured_s) < _LEAST:
            return None
        return sum(self.measured_s) / sum(self.predicted_s)

    def some(self, rng: random.Random) -> list[float]:
        """Draw ratios, long steps more often: their mean is right for the sum of many steps."""
        if not self.measured_s:
            return []
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        ratios = [round(m / p, 4) for p, m in pairs]
        return rng.choices(ratios, self.predicted_s, k=_MOST_RESIDUALS)


def region_of(shape: StepShape) -> Region:
    """Return the kind of a step."""
    if not shape.prefill_pairs:
        return "decode"
    return "mixed" if shape.decode_context else "prefill"


# ---- neighbours ----------------------------------------------------------------------------------


def _sort(recording: Recording) -> _Sorted:
    by_kind: dict[tuple[Region, Beside], list[StepSample]] = defaultdict(list)
    for node_id, steps in recording.steps.items():
        host = recording.hosts[node_id]
        others = sorted(
            (other.ended_s, other.period_s, not other.prefill_pairs)
            for other_id, other_steps in recording.steps.items()
            if other_id != node_id and recording.hosts[other_id] == host
            for other in other_steps
        )
        for step in steps:
            if step.period_s > 0:
                beside = _beside(step, others)
                if beside is not None:
                    by_kind[region_of(step.shape), beside].append(step)
    return _Sorted(by_kind)


def _beside(step: StepSample, others: Sequence[tuple[float, float, bool]]) -> Beside | None:
    """Say what another node of the host computed during most of a step; None: during a part."""
    shared_s = {True: 0.0, False: 0.0}  # is decode |-> seconds
    first = bisect_left(others, (step.began_s, 0.0, False))
    for ended_s, period_s, is_decode in others[first:]:
        began_s = ended_s - period_s
        if began_s >= step.ended_s:
            break
        shared_s[is_decode] += min(ended_s, step.ended_s) - max(began_s, step.began_s)
    total_s = sum(shared_s.values())
    if not total_s:
        return "nothing"
    if total_s < _OVERLAP * step.period_s:
        return None
    return "decode" if shared_s[True] >= shared_s[False] else "prompt"


def _sharing(cores: int, costs: dict[Region, StepCosts], fitted: _Sorted) -> Sharing:
    """Compare steps beside those of a neighbour with the same steps without."""

    def factor(*kinds: tuple[Region, Beside]) -> float:
        ratios = []
        for region, beside in kinds:
            alone = _Found.of(costs[region], fitted.alone(region)).slower
            shared = _Found.of(costs[region], fitted.steps.get((region, beside), [])).slower
            if alone is not None and shared is not None:
                ratios.append(shared / alone)
        return round(max(1.0, statistics.fmean(ratios)), 3) if ratios else 1.0

    return Sharing(
        cores=cores,
        decode_beside_decode=factor(("decode", "decode")),
        decode_beside_prompt=factor(("decode", "prompt")),
        prompt_beside_any=factor(("prefill", "decode"), ("prefill", "prompt")),
    )


# ---- pulls, requests -----------------------------------------------------------------------------


def _pull(
    fitted: Sequence[PullSample], held_out: Sequence[PullSample]
) -> tuple[TransferCosts, _Found]:
    """Fit the transport that most pulls used, and compare it with its held-out pulls."""
    transports = [pull.transport for pull in fitted]
    if not transports:
        nothing = TransferCosts(transport="none", fixed_s=0.0, bytes_per_s=_MOST_BYTES_PER_S)
        return nothing, _Found([], [])
    transport = statistics.mode(transports)
    used = [pull for pull in fitted if pull.transport == transport and pull.seconds > 0]
    rows = np.array([[1 / pull.seconds, pull.num_bytes / pull.seconds] for pull in used])
    fixed_s, byte_s = non_negative_least_squares(rows, np.ones(len(used))).tolist()
    costs = TransferCosts(
        transport=transport, fixed_s=fixed_s, bytes_per_s=1 / max(byte_s, 1 / _MOST_BYTES_PER_S)
    )
    others = [pull for pull in held_out if pull.transport == transport and pull.seconds > 0]
    predicted_s = [_pull_s(costs, pull.num_bytes) for pull in others]
    return costs, _Found(predicted_s, [pull.seconds for pull in others])


def _pull_s(costs: TransferCosts, num_bytes: float) -> float:
    return costs.fixed_s + num_bytes / costs.bytes_per_s


def _overheads(
    measured: Measured, costs: dict[Region, StepCosts], pull: TransferCosts
) -> Overheads:
    """Return what messages and the coordinator add on the way of a request, alone in a cluster."""
    perf, kind = PerfModel(costs["prefill"]), measured.kind
    budget, token_bytes = kind.limits.token_budget, kind.shape.layout.token_bytes

    def first_token_s(idle: Idle) -> float:
        return idle.ttft_s - perf.prefill_s(idle.num_prompt, 0, budget)

    def handoff_s(idle: Idle) -> float:
        last = (idle.num_prompt - 1) % budget + 1  # tokens of the chunk that is pulled last
        return idle.first_gap_s - idle.later_gap_s - _pull_s(pull, last * token_bytes)

    everyone = [*measured.handed_off, *measured.on_one_node]
    return Overheads(
        first_token_s=_typical(map(first_token_s, everyone)),
        handoff_s=_typical(map(handoff_s, measured.handed_off)),
    )


def _typical(seconds: Iterable[float]) -> float:
    known = list(seconds)
    return max(0.0, statistics.median(known)) if known else 0.0


def _ranges(measured: Measured, *steps: _Sorted) -> Ranges:
    batches = [
        step.sampled
        for some in steps
        for (region, _), kept in some.steps.items()
        if region == "decode"
        for step in kept
    ]
    lengths, contexts = measured.prompt_lengths, measured.contexts
    return Ranges(
        prompt_tokens=Range(min(lengths), max(lengths)),
        batch=Range(1, max(batches, default=1)),
        context=Range(min(contexts), max(contexts)),
    )
