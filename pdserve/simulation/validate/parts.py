"""Where the time of live requests went, from what a cluster tells: metrics and samples."""

from __future__ import annotations

from pdserve.cluster.scrape import Samples, between
from pdserve.simulation.calibrate.samples import Recording
from pdserve.simulation.predict.parts import Parts
from pdserve.simulation.step_times import REGIONS, region_of
from pdserve.simulation.total import Total


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
