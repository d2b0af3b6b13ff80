"""`pdserve calibrate`: true costs are found in noisy steps, and neighbours in overlaps."""

from __future__ import annotations

import dataclasses
import itertools
import random

import msgspec
import pytest

from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.commands.simulation.calibrate import drive
from pdserve.commands.simulation.calibrate.drive import Driver, Idle, Sent
from pdserve.commands.simulation.calibrate.fit import Measured, calibrate
from pdserve.commands.simulation.calibrate.residuals import Found
from pdserve.commands.simulation.calibrate.samples import Recording
from pdserve.commands.simulation.calibrate.services import (
    Done,
    Looked,
    Process,
    Work,
    beside_of,
    windows_of,
)
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.step_times import StepTimes
from pdserve.kv import KvDtype
from pdserve.measured.calibration import ModelShape, NodeLimits, Services, ServiceTimes
from pdserve.measured.perf_model import PerfModel, StepRow, StepShape
from pdserve.measured.samples import DraftTally, NodeKind, PullSample, StepSample
from pdserve.node.profiling.fit import fit_costs
from pdserve.protocol import StepCosts
from pdserve.shared.errors import CalibrationError

TRUE = StepCosts(knot_tokens=[1, 64, 512], knot_s=[0.005, 0.015, 0.1], pair_s=5e-8, context_s=4e-7)
KIND = NodeKind(
    device="a processor",
    device_type="cpu",
    cpus=1,
    host_cores=4,
    model="random-50m",
    shape=ModelShape(8, 512, 4, 64, 32000, KvDtype.BFLOAT16, 64, 100_000_000),
    limits=NodeLimits(2048, 512, 64, 8192),
    tensor_parallel=1,
    quantisation="",
)


def some_step(rng: random.Random, kind: str) -> StepShape:
    rows = []
    if kind != "prefill":
        context = rng.randint(10, 3000)
        rows = [StepRow(1, context, is_decoding=True) for _ in range(rng.choice([1, 4, 16, 64]))]
    if kind != "decode":
        rows.append(StepRow(rng.choice([16, 64, 200, 440]), rng.choice([0, 0, 700, 3000])))
    return StepShape.of(rows)


def recorded(
    seed: int, *, slower_beside: float, front_s: float = 0.0, handoff_s: float = 0.0
) -> Recording:
    """Nodes of a host in turns: p, which hands prompts off, a alone, and then a and b at once.

    Beside each other, they also wait for `front_s` of what is in front of them. Steps of p are
    longer by `handoff_s`.
    """
    rng, perf, now_s, number = random.Random(seed), PerfModel(TRUE), 100.0, 0
    recording = Recording(hosts={"p": "host", "a": "host", "b": "host", "far": "another host"})
    recording.steps = {"p": [], "a": [], "b": [], "far": []}

    def stepped(node: str, kind: str, at_s: float, factor: float, more_s: float = 0.0) -> float:
        nonlocal number
        number += 1
        shape = some_step(rng, kind)
        period_s = perf.step_s(shape) * factor * rng.uniform(0.95, 1.05) + more_s
        recording.steps[node].append(
            StepSample(
                number,
                at_s + period_s,
                period_s,
                shape.num_tokens,
                shape.num_sampled,
                shape.prefill_pairs,
                shape.decode_context,
            )
        )
        return at_s + period_s

    for kind in ("prefill", "decode", "mixed"):
        for _ in range(200):
            stepped("far", "decode", now_s, 1.0)  # at the same time, but on another host
            if kind == "prefill":
                now_s = stepped("p", kind, now_s, 1.0, handoff_s)
            else:
                now_s = stepped("a", kind, now_s, 1.0)
    until_s = now_s + 5.0
    for node in ("a", "b"):
        at_s = now_s
        while at_s < until_s:
            at_s = stepped(node, "decode", at_s, slower_beside, front_s)
    recording.pulls = [
        PullSample(number + n, "shm", size, (0.001 + size / 4e9) * rng.uniform(0.9, 1.1))
        for n, size in enumerate([1 << 16, 1 << 20, 1 << 25] * 20)
    ]
    return recording


def measured() -> Measured:
    perf, shape = PerfModel(TRUE), KIND.shape
    handed_off = [
        Idle(
            num_prompt=length,
            ttft_s=0.004 + perf.prefill_s(length, 0, 512),
            first_gap_s=0.005 + 0.003 + 0.001 + length * shape.layout.token_bytes / 4e9,
            later_gap_s=0.005,
        )
        for length in (10, 100, 500)
    ]
    return Measured(
        kind=KIND,
        fitted=recorded(1, slower_beside=1.5),
        held_out=recorded(2, slower_beside=1.5),
        handed_off=handed_off,
        prompt_lengths={1, 3440},
        contexts={7, 3446},
    )


def test_the_true_costs_are_found() -> None:
    found, true = calibrate(measured(), "2026-11-23", 0), PerfModel(TRUE)
    for costs, kind in (
        (found.prefill, "prefill"),
        (found.decode, "decode"),
        (found.mixed, "mixed"),
    ):
        rng, perf = random.Random(3), PerfModel(costs)
        for _ in range(50):
            shape = some_step(rng, kind)
            assert perf.step_s(shape) == pytest.approx(true.step_s(shape), rel=0.08), kind
    assert found.pull.transport == "shm"
    assert found.pull.fixed_s == pytest.approx(0.001, rel=0.1)
    assert found.pull.bytes_per_s == pytest.approx(4e9, rel=0.1)


def test_errors_and_residuals_are_those_of_the_noise() -> None:
    found = calibrate(measured(), "2026-11-23", 0)
    for error in (found.errors.prefill, found.errors.decode, found.errors.mixed):
        assert error is not None
        assert 0.01 < error < 0.05  # even noise of up to 5 % is 2.5 % on average
    for drawn in (found.residuals.prefill, found.residuals.decode, found.residuals.mixed):
        ratios = list(itertools.chain.from_iterable(drawn))
        assert 0.85 < min(ratios) < 0.97
        assert 1.03 < max(ratios) < 1.15


def test_slow_moments_stay_together() -> None:
    """For two of four seconds, all takes twice as long: in whole stretches, not in half of all."""
    steps, at_s = [], 0.0
    for number in range(4000):
        period_s = 0.01 * (1 + (at_s % 4 >= 2))
        at_s += period_s
        steps.append(StepSample(number, at_s, period_s, 1, 1, 0, 100))
    costs = StepCosts(knot_tokens=[1], knot_s=[0.01])
    stretches = Found.of(costs, steps).stretches(random.Random(0))
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    assert len(stretches) == 40
    assert sum(1.0 < mean < 2.0 for mean in means) <= 12  # it began or ended within
    assert 5 <= sum(mean == 2.0 for mean in means) <= 20
    assert all(20 <= len(stretch) <= 26 for stretch in stretches[:-1])


def test_costs_are_those_of_the_average_step_but_for_a_few_that_hung() -> None:
    rng = random.Random(4)
    samples = [
        (StepShape(1, 1, 0, 100), 0.01 * rng.choice([0.8, 0.8, 0.8, 1.6])) for _ in range(400)
    ]
    hung = [(StepShape(1, 1, 0, 100), 1.0)]
    typical = fit_costs(samples + hung).knot_s[0]
    average = fit_costs(samples + hung, of_means=True).knot_s[0]
    assert typical < average < 0.0105


def test_neighbours_of_a_host_are_told_apart_from_nodes_elsewhere() -> None:
    host = calibrate(measured(), "2026-11-23", 0).host
    assert host.decode_beside_decode == pytest.approx(1.5, rel=0.05)
    assert host.decode_beside_prompt == 1.0  # nobody has seen it
    assert host.cores == 4


TIMES: dict[Process, ServiceTimes] = {
    "coordinator": ServiceTimes(1e-3, 1e-6, 6e-4, 1.5e-5),
    "client": ServiceTimes(4e-4, 0.0, 3e-4, 5e-6),
    "prefill": ServiceTimes(6e-4, 2e-6, 0.0, 0.0),
    "decode": ServiceTimes(8e-4, 3e-6, 2e-4, 1e-5),
}


IDLE = 0.03  # of a core, whatever there is to do
ALONE_S = 0.012  # a prompt's step, of one at a time; its node's thread computes for 10 ms of it


def worked(
    requests: int, prompt_tokens: int, steps: int, tokens: int, *, is_alone: bool = False
) -> Work:
    done = requests, prompt_tokens, steps, tokens
    works: dict[Process, Done] = {}
    for process, of in TIMES.items():
        is_node = process in ("prefill", "decode")
        works[process] = Done(
            of.request_s * requests
            + of.prompt_token_s * prompt_tokens
            + of.step_s * steps
            + of.token_s * tokens
            + IDLE * 0.5,
            0.5,
            *done,
            steps_s=ALONE_S * steps if is_node else 0.0,
            engine_s=0.01 * steps if is_node else 0.0,
            is_alone=is_alone,
        )
    return works


WORKS = [
    worked(40, 41_000, 300, 250),
    worked(160, 9_000, 660, 5600),
    worked(110, 70_000, 700, 1900),
    worked(90, 30_000, 100, 4000),
    worked(20, 30_000, 500, 500),
    worked(0, 0, 0, 0),
]


def test_what_services_take_is_told_apart_from_the_bus() -> None:
    """With as many nodes as cores, all that coordinator and client take is taken from steps."""
    seen = measured()
    seen.works = WORKS
    seen.kind = msgspec.structs.replace(KIND, host_cores=2)
    seen.fitted = recorded(1, slower_beside=1.2, front_s=9e-4 + 2e-5 * 21)  # a batch on average
    seen.held_out = recorded(2, slower_beside=1.2, front_s=9e-4 + 2e-5 * 21)
    found = calibrate(seen, "2026-11-26", 0)
    services = found.services
    for process in ("coordinator", "client"):
        times, true = getattr(services, process), TIMES[process]
        assert msgspec.structs.astuple(times) == pytest.approx(
            msgspec.structs.astuple(true), rel=0.01, abs=1e-9
        )
    # What decode nodes do for steps is in the times of these.
    for times, request_s, token_s in (
        (services.prefill, 6e-4, 2e-6),
        (services.decode, 8e-4, 3e-6),
    ):
        assert msgspec.structs.astuple(times) == pytest.approx((request_s, token_s, 0, 0))
    assert found.host.decode_beside_decode == pytest.approx(1.2, rel=0.05)
    # What they do for requests is simulated, and what they do for steps runs beside these.
    nodes, of = [work["decode"] for work in WORKS], TIMES["decode"]
    steps_s = sum(of.step_s * d.num_steps + of.token_s * d.num_tokens for d in nodes)
    engine_s = sum(d.engine_s for d in nodes)
    threads = 1 + 2 * steps_s / (steps_s + engine_s)
    assert found.host.node_threads == pytest.approx(threads, rel=1e-3)
    seen.works = []
    found = calibrate(seen, "2026-11-26", 0)
    assert found.services == Services()
    assert found.host.decode_beside_decode > 1.25


def test_what_is_done_for_handoffs_during_steps_is_in_their_time() -> None:
    """Prompts that are decoded where they are computed take no such time, also without streams."""
    seen, shape = measured(), StepShape(64, 1, 64 * 65 // 2, 0)
    seen.fitted = recorded(1, slower_beside=1.0, handoff_s=0.01)
    seen.held_out = recorded(2, slower_beside=1.0, handoff_s=0.01)
    found = calibrate(seen, "2026-11-30", 0)
    longer_s = {}
    for decodes in (False, True):
        times = StepTimes(Machine.of(found).step_costs, decodes=decodes)
        longer_s[decodes] = times.expected_s(shape) - PerfModel(TRUE).step_s(shape)
    assert longer_s == {False: pytest.approx(0.01, abs=2e-3), True: pytest.approx(0, abs=2e-3)}


@pytest.mark.parametrize(("prompt_tokens", "left"), [(1700, 0.5), (1, 0.0)])
def test_what_a_prefill_node_does_beside_its_steps_is_what_these_leave(
    prompt_tokens: int, left: float
) -> None:
    """Of one prompt at a time, its step takes 2 ms longer than is computed: no more is counted."""
    works = [*WORKS, worked(1, prompt_tokens, 1, 1, is_alone=True)]
    services, _ = beside_of(works)
    times = left * 6e-4, left * 2e-6, 0.0, 0.0
    assert msgspec.structs.astuple(services.prefill) == pytest.approx(times, abs=1e-12)


def test_windows_have_what_came_in_them() -> None:
    """A request is work for nodes when it has a token, and for the others when it is sent."""
    names = "coordinator", "client", "prefill-0", "decode-0"
    looks = [
        Looked(at_s, dict.fromkeys(names, (0.1 * n, 0.2 * n)))
        for n, at_s in enumerate((10.0, 10.5, 11.0))
    ]
    sent = [Sent(10.1, 10.6, 50), Sent(10.2, 10.4, 7), Sent(10.7, None, 900)]
    steps = {"prefill-0": [(10.4, 1), (10.6, 0)], "decode-0": [(10.5, 4), (10.9, 2), (10.95, 2)]}
    read = Recording(
        steps={
            node: [StepSample(n, at_s, 0.05, 9, sampled, 0, 0) for n, (at_s, sampled) in all_of]
            for node, of in steps.items()
            for all_of in [list(enumerate(of))]
        },
        tallies={"decode-0": DraftTally(tried=1, drafted=2, accepted=0, wrong=1)},
    )
    first, second = windows_of(looks, sent, read, is_alone=False)
    coordinator = dataclasses.astuple(first["coordinator"])
    assert coordinator == pytest.approx((0.1, 0.5, 2, 57, 2, 1 + 4 * 0.75, 0.1, 0.2, False))
    assert (second["client"].num_requests, second["client"].num_prompt_tokens) == (1, 900)
    assert (first["prefill"].num_requests, first["prefill"].num_steps) == (1, 1)
    assert (second["prefill"].num_prompt_tokens, second["prefill"].num_steps) == (50, 0)
    assert (first["decode"].num_steps, second["decode"].num_tokens) == (1, 3.0)


@pytest.mark.long
def test_nodes_are_simulated_with_what_they_believe() -> None:
    seen = measured()
    seen.held_out.believed = believed = StepCosts(knot_tokens=[1, 64], knot_s=[0.004, 0.02])
    found = calibrate(seen, "2026-11-26", 0)
    assert Machine.of(found).costs == believed
    assert Machine.of(found).step_costs["decode"] == found.decode
    seen.held_out.believed = None
    found = calibrate(seen, "2026-11-26", 0)
    assert Machine.of(found).costs == found.mixed


def test_what_messages_add_is_what_steps_and_pulls_leave() -> None:
    overheads = calibrate(measured(), "2026-11-23", 0).overheads
    assert overheads.first_token_s == pytest.approx(0.004, abs=0.003)
    assert overheads.handoff_s == pytest.approx(0.003, abs=0.0005)
    seen = measured()
    seen.handed_off = [idle for idle in seen.handed_off if idle.num_prompt == 100]
    overheads = calibrate(seen, "2026-11-23", 0).overheads
    seen.works = WORKS
    rest = calibrate(seen, "2026-11-23", 0).overheads
    # Of a prompt of 100 tokens, these services take the others.
    prefill_s = 1e-3 + 4e-4 + 6e-4 + 6e-4 + 3e-4 + 2e-5 + 100 * (1e-6 + 2e-6)
    assert overheads.first_token_s - rest.first_token_s == pytest.approx(prefill_s, abs=1e-5)
    assert overheads.handoff_s - rest.handoff_s == pytest.approx(8e-4 + 100 * 3e-6, abs=1e-5)


def test_a_kind_that_was_not_seen_is_fitted_with_the_others_and_its_error_is_unknown() -> None:
    seen = measured()
    for recording in (seen.fitted, seen.held_out):
        for node, steps in recording.steps.items():
            recording.steps[node] = [s for s in steps if not (s.prefill_pairs and s.decode_context)]
    found, true = calibrate(seen, "2026-11-23", 0), PerfModel(TRUE)
    assert found.errors.mixed is None
    assert found.residuals.mixed == []
    shape = some_step(random.Random(5), "mixed")
    assert PerfModel(found.mixed).step_s(shape) == pytest.approx(true.step_s(shape), rel=0.15)


class Growing:
    """A cluster whose prompts take what their new tokens and their keys take; and its clock."""

    def __init__(self, token_s: float) -> None:
        self.now_s = 100.0
        self.prompts: list[list[int]] = []
        self._token_s = token_s

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    async def one_by_one(self, requests: list[TimedRequest], salt: str, _: float) -> list[Outcome]:
        [request] = requests
        before = self.prompts[-1] if self.prompts else []
        is_longer = request.prompt[: len(before)] == before
        num_cached = len(before) if is_longer else 0
        num_pairs = (len(request.prompt) ** 2 - num_cached**2) / 2
        took_s = self._token_s * (len(request.prompt) - num_cached + num_pairs / 4096)
        self.now_s += took_s
        self.prompts.append(request.prompt)
        outcome = Outcome(kind="", due_s=0.0, num_prompt=len(request.prompt), num_output=16)
        outcome.sent_s, outcome.arrivals_s, outcome.end = 1e-3, [took_s], "finished"
        return [outcome]


@pytest.mark.parametrize(("token_s", "least"), [(1e-3, 4000), (1e-5, 8192 - 48)])
async def test_a_prompt_grows_as_far_as_the_time_allows(
    token_s: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Growing(token_s)
    monkeypatch.setattr(drive, "time", nodes)
    driver = Driver(nodes, KIND.limits, KIND.shape.block_size, 0)  # type: ignore[arg-type]
    await driver.growing(10.0)
    assert 109 < nodes.now_s < 110.5
    assert least <= max(driver.prompt_lengths) <= 8192 - 48
    lengths = [*map(len, nodes.prompts)]
    assert lengths[:3] == [256, 410, 656]
    begins = [n for n, length in enumerate(lengths) if length == 256]
    # Another begins behind the longest one, and shares nothing with it.
    assert [lengths[n - 1] for n in begins[1:]] == [8192 - 48] * (len(begins) - 1)
    assert (len(begins) > 1) == (token_s < 1e-4)
    for before, after in itertools.pairwise(nodes.prompts):
        assert (after[: len(before)] == before) == (len(after) > 256)


async def test_no_prompt_grows_so_much_that_its_deadline_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Growing(0.1)
    monkeypatch.setattr(drive, "time", nodes)
    driver = Driver(nodes, KIND.limits, KIND.shape.block_size, 0)  # type: ignore[arg-type]
    await driver.growing(2000.0)
    assert max(driver.prompt_lengths) > 4000
    assert max(sent.first_s - sent.at_s for sent in driver.sent if sent.first_s) < 120


def test_ranges_are_what_was_sent() -> None:
    ranges = calibrate(measured(), "2026-11-23", 0).ranges
    assert (ranges.prompt_tokens.least, ranges.prompt_tokens.most) == (1, 3440)
    assert (ranges.batch.least, ranges.batch.most) == (1, 64)
    assert (ranges.context.least, ranges.context.most) == (7, 3446)


def test_a_cluster_that_was_busy_all_the_time_is_no_ground_for_a_calibration() -> None:
    seen = Measured(KIND, fitted=Recording({"a": []}, {"a": "host"}))
    with pytest.raises(CalibrationError, match="only 0 steps were measured without neighbours"):
        calibrate(seen, "2026-11-23", 0)
