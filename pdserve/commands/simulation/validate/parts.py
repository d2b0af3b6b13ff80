"""Where the time of live requests went, from what a cluster tells: metrics and samples."""

from __future__ import annotations

from pdserve.commands.cluster.scrape import Samples, between
from pdserve.commands.simulation.calibrate.neighbours import sort
from pdserve.commands.simulation.calibrate.residuals import Found
from pdserve.commands.simulation.calibrate.samples import Recording
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.predict.parts import Parts
from pdserve.commands.simulation.step_times import REGIONS, region_of
from pdserve.commands.simulation.total import Total
from pdserve.measured.calibration import Calibration


def pace_of(calibration: Calibration, recording: Recording) -> float | None:
    """Return what steps of an idle cluster took, over what was calibrated; None: too few."""
    found, alone = Found([], []), sort(recording)
    for region, costs in Machine.of(calibration).step_costs.items():
        found = found.and_then(Found.of(costs, alone.alone(region)))
    return found.slower


def parts_of(before: Samples, after: Samples, recording: Recording) -> Parts:
    """Return the parts of a run.

    Args:
        before: the coordinator's metrics at its beginning.
        after: these at its end.
        recording: the nodes' steps meanwhile.
    """
    steps = {region: Total() for region in REGIONS}
    for of_node in recording.steps.values():
        for step in of_node:
            steps[region_of(step.shape)].add(step.period_s)

    def mean_ms(phase: str) -> float | None:
        seen = between(before, after, f"pdserve_request_{phase}_seconds")
        return 1e3 * seen.mean if seen.count else None

    return Parts(
        queue=mean_ms("queue_time"),
        prefill=mean_ms("prefill_time"),
        handoff=mean_ms("handoff"),
        decode=mean_ms("decode_time"),
        steps={region: total.mean_ms for region, total in steps.items()},
        num_steps={region: total.count for region, total in steps.items()},
    )
