"""What nodes of one host cost each other, from steps that ran beside those of another node.

They wait for the memory bus, and for coordinator and client where no core is idle. What these take
is measured by itself, so the bus has the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pdserve.commands.simulation.calibrate.residuals import Found
from pdserve.commands.simulation.calibrate.samples import Recording
from pdserve.commands.simulation.step_times import timed_as
from pdserve.measured.calibration import Region, Services, Sharing
from pdserve.measured.perf_model import PerfModel
from pdserve.measured.samples import NodeKind, StepSample
from pdserve.protocol import StepCosts

Neighbour = Literal["decode", "prompt"]
_NEIGHBOURS: Final[tuple[Neighbour, ...]] = get_args(Neighbour)

_OVERLAP = 0.5  # share of a step during which another node computed, to count as beside it


@dataclass(frozen=True, slots=True)
class Beside:
    """A step, and those of other nodes during most of it."""

    step: StepSample
    region: Region
    others: list[tuple[StepSample, float]]  # each with the seconds that they had in common

    @property
    def neighbour(self) -> Neighbour:
        """What took most of the others' time."""
        shared_s = {True: 0.0, False: 0.0}
        for other, common_s in self.others:
            shared_s[other.shape.is_decode] += common_s
        return "decode" if shared_s[True] >= shared_s[False] else "prompt"


@dataclass(frozen=True, slots=True)
class Sorted:
    """Steps by what the host did meanwhile; those beside others during a part are left out."""

    by_region: dict[Region, list[StepSample]]
    beside: list[Beside]

    def alone(self, region: Region) -> list[StepSample]:
        """Return the steps of a kind beside which nothing ran, of one node after the other."""
        return self.by_region.get(region, [])

    def decodes(self) -> Iterator[StepSample]:
        """Yield all decode steps."""
        yield from self.alone("decode")
        yield from (found.step for found in self.beside if found.step.shape.is_decode)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What nodes cost each other, and how measured times scatter around that."""

    sharing: Sharing
    decodes: Found
    prompts: Found


def sort(recording: Recording) -> Sorted:
    """Sort what was recorded of all nodes."""
    alone: dict[Region, list[StepSample]] = defaultdict(list)
    beside: list[Beside] = []
    for node_id, steps in recording.steps.items():
        host = recording.hosts[node_id]
        others = sorted(
            (
                other
                for other_id, other_steps in recording.steps.items()
                if other_id != node_id and recording.hosts[other_id] == host
                for other in other_steps
            ),
            key=lambda other: other.ended_s,
        )
        ends_s = [other.ended_s for other in others]
        decodes = any(step.decode_context for step in steps)
        for step in steps:
            if step.period_s > 0:
                region = timed_as(step.shape, decodes=decodes)
                found = Beside(step, region, _common(step, others, ends_s))
                total_s = sum(common_s for _, common_s in found.others)
                if not total_s:
                    alone[region].append(step)
                elif total_s >= _OVERLAP * step.period_s:
                    beside.append(found)
    return Sorted(alone, beside)


def _common(
    step: StepSample, others: Sequence[StepSample], ends_s: Sequence[float]
) -> list[tuple[StepSample, float]]:
    found = []
    for other in others[bisect_left(ends_s, step.began_s) :]:
        if other.began_s >= step.ended_s:
            break
        common_s = min(other.ended_s, step.ended_s) - max(other.began_s, step.began_s)
        if common_s > 0:
            found.append((other, common_s))
    return found


def meet(
    kind: NodeKind,
    costs: Mapping[Region, StepCosts],
    beside: Sequence[Beside],
    services: Services,
    node_threads: float,
) -> Neighbours:
    """Compare steps beside those of a neighbour with what they take alone."""
    cores = kind.host_cores
    has_idle_core = cores > 2 * kind.cpus  # beside both nodes
    perf = {region: PerfModel(of_region) for region, of_region in costs.items()}
    by_kind: dict[tuple[Neighbour, Neighbour], Found] = defaultdict(lambda: Found([], []))
    for found in beside:
        shape = found.step.shape
        waits = 1.0 if has_idle_core else _waits_for_services(services, cores, found)
        pairs = by_kind["decode" if shape.is_decode else "prompt", found.neighbour]
        pairs.predicted_s.append(perf[found.region].step_s(shape) * waits)
        pairs.measured_s.append(found.step.period_s)

    def factor(own: Neighbour, neighbour: Neighbour) -> float:
        return round(max(1.0, by_kind[own, neighbour].slower or 1.0), 3)

    def all_of(own: Neighbour) -> Found:
        both = Found([], [])
        for neighbour in _NEIGHBOURS:
            # What waits are reckoned to be is too much where services do several things at once.
            pairs = by_kind[own, neighbour]
            slower = pairs.slower or 1.0
            both = both.and_then(Found([slower * s for s in pairs.predicted_s], pairs.measured_s))
        return both

    return Neighbours(
        sharing=Sharing(
            cores=cores,
            node_threads=node_threads,
            decode_beside_decode=factor("decode", "decode"),
            decode_beside_prompt=factor("decode", "prompt"),
            prompt_beside_decode=factor("prompt", "decode"),
            prompt_beside_prompt=factor("prompt", "prompt"),
        ),
        decodes=all_of("decode"),
        prompts=all_of("prompt"),
    )


def _waits_for_services(services: Services, cores: int, found: Beside) -> float:
    """Return how much longer a step takes where all cores compute, as `Host` has it.

    In the measured time of a step, coordinator and client have had their share.
    """
    if not cores:
        return 1.0
    step = found.step
    taken_s = _services_s(services, step)
    for other, common_s in found.others:
        taken_s += _services_s(services, other) * common_s / other.period_s
    return 1 / max(0.5, 1 - taken_s / step.period_s / cores)


def _services_s(services: Services, step: StepSample) -> float:
    """Return what a step's tokens are for services; in mixed steps, most are of streams."""
    if not step.sampled:
        return 0.0
    num_prompts = step.sampled if not step.decode_context else 0
    return sum(
        of.step_s + of.token_s * step.sampled + of.request_s * num_prompts
        for of in (services.coordinator, services.client)
    )
