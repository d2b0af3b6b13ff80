"""Where the time goes: the same moments in simulated requests and in what live nodes tell."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.workload import Sketch
from pdserve.commands.cluster.scrape import parse
from pdserve.commands.simulation.calibrate.samples import Recording
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.outcome import Outcome
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.load import call_of
from pdserve.commands.simulation.predict.parts import Parts, PhaseTotals
from pdserve.commands.simulation.predict.tally import Tally
from pdserve.commands.simulation.validate.parts import parts_of
from pdserve.measured.calibration import Overheads
from pdserve.measured.samples import StepSample
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import PolicyConfig

LATE = msgspec.structs.replace(
    load_calibration("core-53m"), overheads=Overheads(first_token_s=0.004, handoff_s=0.003)
)


def simulated(*sketches: Sketch, strides: bool) -> tuple[list[Outcome], Parts]:
    """Run them on a node of each role."""
    events, machine, policy = Events(), Machine.of(LATE), PolicyConfig()
    nodes = [
        Node("p", NodeRole.PREFILL, machine, events, policy, strides=strides),
        Node("d", NodeRole.DECODE, machine, events, policy, strides=strides),
    ]
    cluster, seen = Cluster(events, nodes), []
    load = [call_of(sketch, sketch.at_s, 512, Slo()) for sketch in sketches]
    totals = PhaseTotals()

    def see(outcome: Outcome) -> None:
        seen.append(outcome)
        totals.note(outcome)

    cluster.run(Coordinator(cluster, "disaggregated"), load, see)
    return seen, totals.parts(node.steps for node in nodes)


@pytest.mark.parametrize("strides", [True, False])
def test_the_parts_of_a_request_alone_are_all_of_it(strides: bool) -> None:
    (outcome,), parts = simulated(Sketch(1.0, "t", 0, 640, 50), strides=strides)
    assert parts.queue == 0.0
    assert parts.prefill == pytest.approx(1e3 * (outcome.ttft_s - 0.004))
    assert parts.handoff is not None
    assert parts.handoff > 3.0  # the message, and the pull
    assert parts.decode is not None
    later_ms = 1e3 * (outcome.token_times_s[-1] - outcome.token_times_s[0])
    assert parts.handoff + parts.decode == pytest.approx(later_ms)
    assert parts.num_steps == {"prefill": 10, "decode": 49, "mixed": 0}
    assert parts.decode == pytest.approx(49 * parts.steps["decode"])


def test_parts_do_not_depend_on_strides() -> None:
    sketches = [Sketch(0.05 * n, "t", n, 200 + 100 * n, 20 + 7 * n) for n in range(12)]
    (_, stepped), (_, skipped) = (simulated(*sketches, strides=s) for s in (False, True))
    assert skipped.num_steps == stepped.num_steps
    assert skipped.steps["decode"] == pytest.approx(stepped.steps["decode"])
    assert skipped.handoff == pytest.approx(stepped.handoff)
    assert stepped.queue is not None
    assert stepped.queue > 0


def test_unfinished_calls_are_not_counted() -> None:
    tally = Tally(Promise(1.0, 1.0), {"": 9.0}, lambda: None)
    tally.note(Outcome(call_of(Sketch(0.0, "t", 0, 10, 5), 0.0, 512, Slo())))
    parts = tally.phases.parts([])
    assert parts.queue is None
    assert parts.steps == {"prefill": None, "decode": None, "mixed": None}


def reading(count: int, seconds: float) -> str:
    """A coordinator's metrics: so many requests, each of whose phases took that long."""
    lines = []
    for phase in ("queue_time", "prefill_time", "handoff", "decode_time"):
        name = f"pdserve_request_{phase}_seconds"
        lines += [
            f"# TYPE {name} histogram",
            f'{name}_bucket{{le="+Inf"}} {count}',
            f"{name}_count {count}",
            f"{name}_sum {count * seconds}",
        ]
    return "\n".join([*lines, ""])


def test_live_parts_are_what_came_between_two_readings() -> None:
    step = StepSample(1, 9.0, 0.006, 3, 3, 0, 900)
    recording = Recording({"d": [step, step], "p": [StepSample(1, 9.0, 0.05, 400, 1, 80_200, 0)]})
    before, after = parse(reading(10, 0.5)), parse(reading(14, 0.4))
    parts = parts_of(before, after, recording)
    each_ms = pytest.approx(1e3 * (14 * 0.4 - 10 * 0.5) / 4)
    assert (parts.queue, parts.prefill, parts.handoff, parts.decode) == (each_ms,) * 4
    assert parts.steps == {"prefill": pytest.approx(50), "decode": pytest.approx(6), "mixed": None}
    assert parts.num_steps == {"prefill": 1, "decode": 2, "mixed": 0}
    assert parts_of(before, before, Recording()).handoff is None
