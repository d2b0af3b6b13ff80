"""From what nodes measured to a calibration: costs by kind of step, and how wrong they are.

Half of the measurements are fitted, the other half, of other requests, says how good the fit is.
Steps that ran beside those of another node of the host are kept apart: they say what the nodes cost
each other.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from msgspec import structs

from pdserve.commands.simulation.calibrate.drive import Idle
from pdserve.commands.simulation.calibrate.neighbours import Sorted, meet, sort
from pdserve.commands.simulation.calibrate.residuals import LEAST, Found
from pdserve.commands.simulation.calibrate.samples import Recording
from pdserve.commands.simulation.calibrate.services import Work, beside_of
from pdserve.commands.simulation.step_times import REGIONS
from pdserve.measured.calibration import (
    Calibration,
    HeldOutErrors,
    Overheads,
    Range,
    Ranges,
    Region,
    Residuals,
    Services,
    ServiceTimes,
)
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.measured.samples import NodeKind, PullSample, StepSample
from pdserve.node.profiling.fit import LEAST_STEP_S, fit_costs, non_negative_least_squares
from pdserve.protocol import StepCosts, TransferCosts
from pdserve.shared.errors import CalibrationError

_ALIKE = 200  # measurements of steps with as many tokens, beyond which more say nothing new
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
    works: list[Work] = field(default_factory=list)  # of each window; none: not measured


def calibrate(measured: Measured, date: str, seed: int) -> Calibration:
    """Fit the costs, and judge them.

    Raises:
        CalibrationError: hardly anything was measured.
    """
    rng = random.Random(seed)
    fitted, held_out = sort(measured.fitted), sort(measured.held_out)
    everything = list(chain.from_iterable(fitted.alone(region) for region in REGIONS))
    if len(everything) < LEAST:
        raise CalibrationError(
            f"only {len(everything)} steps were measured without neighbours: give more --budget-s, "
            "and a cluster that nobody uses"
        )
    half = _costs({region: fitted.alone(region) for region in REGIONS}, rng)
    found = {region: Found.of(half[region], held_out.alone(region)) for region in REGIONS}
    # Once the errors are known, all that was measured is of use.
    alone = {region: fitted.alone(region) + held_out.alone(region) for region in REGIONS}
    costs = _costs(alone, rng)
    scatter = {region: Found.of(costs[region], alone[region]) for region in REGIONS}
    pull, pulls = _pull(measured.fitted.pulls, measured.held_out.pulls)
    kind = measured.kind
    services, node_threads = beside_of(measured.works)
    neighbours = meet(kind, costs, fitted.beside + held_out.beside, services, node_threads)
    calibration = Calibration(
        date=date,
        device=kind.device,
        device_type=kind.device_type,
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
        believed=measured.held_out.believed,
        pull=pull,
        residuals=Residuals(
            prefill=scatter["prefill"].stretches(rng),
            decode=scatter["decode"].stretches(rng),
            mixed=scatter["mixed"].stretches(rng),
            pull=pulls.stretches(rng),
            prompt_beside=neighbours.prompts.stretches(rng),
            decode_beside=neighbours.decodes.stretches(rng),
        ),
        ranges=_ranges(measured, fitted, held_out),
        errors=HeldOutErrors(
            prefill=found["prefill"].error,
            decode=found["decode"].error,
            mixed=found["mixed"].error,
            pull=pulls.error,
        ),
        host=neighbours.sharing,
        overheads=_overheads(measured, costs, pull, services),
        services=services,
        drafts=measured.held_out.drafts,
    )
    calibration.check()
    return calibration


# ---- steps ---------------------------------------------------------------------------------------


def _costs(
    steps: Mapping[Region, Sequence[StepSample]], rng: random.Random
) -> dict[Region, StepCosts]:
    """Fit each kind of steps; those of which there are hardly any, as all together.

    Context costs mixed steps what it costs decodes, which tell it better: they vary in less.
    """
    everything = list(chain.from_iterable(steps.values()))
    costs: dict[Region, StepCosts] = {}
    for region in REGIONS:
        found = steps[region] if len(steps[region]) >= LEAST else everything
        chosen = [(step.shape, step.period_s) for step in _varied(found, rng)]
        if region == "mixed" and len(steps["decode"]) >= LEAST:
            costs[region] = _beside_context(chosen, costs["decode"].context_s)
        else:
            costs[region] = fit_costs(chosen, of_means=True)
    return costs


def _beside_context(samples: Sequence[tuple[StepShape, float]], context_s: float) -> StepCosts:
    """Fit the other costs, where those of context are known."""
    rest = [
        (replace(shape, decode_context=0), max(LEAST_STEP_S, s - context_s * shape.decode_context))
        for shape, s in samples
    ]
    return structs.replace(fit_costs(rest, of_means=True), context_s=context_s)


def _varied(steps: Iterable[StepSample], rng: random.Random) -> list[StepSample]:
    """Return steps of all sizes, a few of each: small batches take more steps a second."""
    alike: dict[int, list[StepSample]] = defaultdict(list)
    for step in steps:
        alike[step.tokens].append(step)
    return [step for some in alike.values() for step in rng.sample(some, min(_ALIKE, len(some)))]


# ---- pulls, requests -----------------------------------------------------------------------------


def _pull(
    fitted: Sequence[PullSample], held_out: Sequence[PullSample]
) -> tuple[TransferCosts, Found]:
    """Fit the transport that most pulls used, and compare it with its held-out pulls."""
    transports = [pull.transport for pull in fitted]
    if not transports:
        nothing = TransferCosts(transport="none", fixed_s=0.0, bytes_per_s=_MOST_BYTES_PER_S)
        return nothing, Found([], [])
    transport = statistics.mode(transports)
    used = [pull for pull in fitted if pull.transport == transport and pull.seconds > 0]
    rows = np.array([[1 / pull.seconds, pull.num_bytes / pull.seconds] for pull in used])
    fixed_s, byte_s = non_negative_least_squares(rows, np.ones(len(used))).tolist()
    costs = TransferCosts(
        transport=transport, fixed_s=fixed_s, bytes_per_s=1 / max(byte_s, 1 / _MOST_BYTES_PER_S)
    )
    others = [pull for pull in held_out if pull.transport == transport and pull.seconds > 0]
    predicted_s = [_pull_s(costs, pull.num_bytes) for pull in others]
    return costs, Found(predicted_s, [pull.seconds for pull in others])


def _pull_s(costs: TransferCosts, num_bytes: float) -> float:
    return costs.fixed_s + num_bytes / costs.bytes_per_s


def _overheads(
    measured: Measured, costs: dict[Region, StepCosts], pull: TransferCosts, services: Services
) -> Overheads:
    """Return what messages add on the way of a request, alone in a cluster, beside all services."""
    perf, kind = PerfModel(costs["prefill"]), measured.kind
    budget, token_bytes = kind.limits.token_budget, kind.shape.layout.token_bytes

    def first_token_s(idle: Idle, node: ServiceTimes) -> float:
        steps_s = perf.prefill_s(idle.num_prompt, 0, budget)
        taken_s = _first_token_s(services, idle.num_prompt) + _request_s(node, idle.num_prompt)
        return idle.ttft_s - steps_s - taken_s

    def handoff_s(idle: Idle) -> float:
        last = (idle.num_prompt - 1) % budget + 1  # tokens of the chunk that is pulled last
        taken_s = _pull_s(pull, last * token_bytes) + _request_s(services.decode, idle.num_prompt)
        return idle.first_gap_s - idle.later_gap_s - taken_s

    firsts_s = [first_token_s(idle, services.prefill) for idle in measured.handed_off]
    firsts_s += [first_token_s(idle, ServiceTimes()) for idle in measured.on_one_node]
    return Overheads(
        first_token_s=_typical(firsts_s),
        handoff_s=_typical(map(handoff_s, measured.handed_off)),
    )


def _first_token_s(services: Services, num_prompt: int) -> float:
    """Return what coordinator and client take until the client has the first token."""
    both = services.coordinator, services.client
    return sum(_request_s(of, num_prompt) + of.step_s + of.token_s for of in both)


def _request_s(times: ServiceTimes, num_prompt: int) -> float:
    return times.request_s + times.prompt_token_s * num_prompt


def _typical(seconds: Iterable[float]) -> float:
    known = list(seconds)
    return max(0.0, statistics.median(known)) if known else 0.0


def _ranges(measured: Measured, *steps: Sorted) -> Ranges:
    batches = [step.sampled for some in steps for step in some.decodes()]
    lengths, contexts = measured.prompt_lengths, measured.contexts
    return Ranges(
        prompt_tokens=Range(min(lengths), max(lengths)),
        batch=Range(1, max(batches, default=1)),
        context=Range(min(contexts), max(contexts)),
    )
