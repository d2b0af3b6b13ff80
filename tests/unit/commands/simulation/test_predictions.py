"""`pdserve simulate`: what it asks, refuses and answers, and that it scores as `bench compare`."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import pytest

from pdserve.commands.bench.load.outcome import Outcome as Sent
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.slo_score import score
from pdserve.commands.bench.load.workload import Sketch
from pdserve.commands.cli.main import main
from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.outcome import Outcome
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.deployment import Deployment, Result, Rig, run
from pdserve.commands.simulation.predict.goodput import find_goodput, pooled
from pdserve.commands.simulation.predict.load import (
    BatchOutside,
    Question,
    Ranged,
    call_of,
    calls_of,
    turn_at,
)
from pdserve.commands.simulation.predict.tally import Tally
from pdserve.commands.simulation.prompts import KnownPrompt, request_of
from pdserve.lifecycle import Targets
from pdserve.measured.calibration import (
    Calibration,
    Range,
    Residuals,
    Services,
    ServiceTimes,
    write_calibration,
)
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import PolicyConfig
from pdserve.shared.errors import CalibrationError
from tests.simulation.scenarios import disaggregated
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson

CORE = load_calibration("core-53m")
NOISY = msgspec.structs.replace(
    CORE,
    residuals=Residuals(prefill=[[0.9], [1.1]], decode=[[0.95, 1.05, 1.0]], mixed=[[1.0], [1.2]]),
)
PAIR = Deployment("disaggregated", 1, 1)
QUESTION = Question(trace="", scenario="conversation", length_scale=0.0, count=60)
PROMISE = Promise(2.0, 0.02)


def rig(calibration: Calibration = NOISY, *, extrapolates: bool = False) -> Rig:
    return Rig(
        calibration=calibration,
        policy=PolicyConfig(),
        ranges=Ranged(calibration, extrapolates=extrapolates),
        one_host=False,
        admission=False,
        target=0.9,
    )


def test_a_simulation_is_scored_as_a_live_run() -> None:
    """The same calls as a client would have seen them, all their tokens kept."""
    slo, tight = Slo(ttft_s=1.0, tpot_s=0.05), Promise(0.5, 0.03)
    load = merged(
        calls("a", poisson(3, 20, 1), lognormal(400, 0.9, 4000), lognormal(80, 0.5, 300), slo),
        calls("b", poisson(0.5, 20, 2), fixed(6000), fixed(1), slo),
    )
    simulated = disaggregated(load, PolicyConfig()).score.outcomes
    tally = Tally(tight, {"": 1e9}, lambda: None)
    for outcome in simulated:
        tally(outcome)
    sent = [
        Sent(
            kind="", due_s=o.call.at_s, sent_s=o.call.at_s, num_prompt=o.call.prompt.num_tokens,
            num_output=o.call.num_output, arrivals_s=o.token_times_s,
            num_received=len(o.token_times_s), end="finished",
        )
        for o in simulated
    ]  # fmt: skip
    ours, theirs = tally.score(0.9), score(sent, tight, 0.9)
    assert 0 < theirs.attainment < 1
    for percentile in ("p50", "p90", "p99"):
        exact = getattr(theirs.itl_ms, percentile)
        assert getattr(ours.itl_ms, percentile) == pytest.approx(exact, rel=0.006)
    assert msgspec.structs.replace(ours, itl_ms=theirs.itl_ms) == theirs


@pytest.mark.long  # a life is repeated by default
def test_the_seed_decides_all() -> None:
    case = QUESTION.case(NOISY, 3)
    once, again, other = (run(rig(), PAIR, case, 2.0, 60, PROMISE, s) for s in (1, 1, 2))
    assert once.score == again.score
    assert once.score != other.score


@pytest.mark.long
def test_a_hopeless_rate_is_not_simulated_to_its_end() -> None:
    case = QUESTION.case(NOISY, 0)
    result = run(rig(), PAIR, case, 100.0, 400, PROMISE, 0)
    assert result.stopped_early
    assert result.score.attainment < 0.9
    assert result.score.unfinished > 0


@pytest.mark.long
def test_prompts_of_calls_that_have_no_token_cost_nothing() -> None:
    """Nobody has computed them, or not all of them: tokens would seem too cheap."""
    tally = Tally(PROMISE, {"": 1e9}, lambda: None)
    begun, waiting, refused = (
        Outcome(call_of(Sketch(0.0, "", number, 640, 5), 0.0, 640, Slo())) for number in range(3)
    )
    begun.token_times_s, begun.num_cached_tokens = [1.0, 1.5], 64
    refused.was_refused = True
    for outcome in (begun, waiting, refused):
        tally.note(outcome)
    assert (tally.num_prompt_tokens, tally.num_cached_tokens) == (640, 64)
    assert tally.num_output_tokens == 2
    case = QUESTION.case(NOISY, 0)
    patient = replace(rig(), target=0.0)
    cut = run(patient, PAIR, case, 100.0, 100, PROMISE, 0, 1.5)
    whole = run(patient, PAIR, case, 100.0, 100, PROMISE, 0)
    assert cut.score.sent == whole.score.sent
    assert 0 < cut.prompt_tokens < 0.5 * whole.prompt_tokens


@pytest.mark.long
def test_a_run_that_was_stopped_weighs_as_much_as_one_that_was_not() -> None:
    """The worse a run is, the sooner it is stopped: its few requests would hardly count."""
    case = QUESTION.case(NOISY, 0)
    good = run(rig(), PAIR, case, 1.0, 300, Promise(2.0, 0.05), 0)
    lost = run(rig(), PAIR, case, 1.0, 300, Promise(0.01, 0.05), 0)
    assert lost.stopped_early
    assert lost.score.sent < good.score.sent == 300
    both = pooled([good, lost]).attainment
    assert both == pytest.approx((good.score.attainment + lost.score.attainment) / 2, abs=0.01)
    assert pooled([lost]).attainment == lost.score.attainment


def test_what_was_not_calibrated_is_refused_or_marked() -> None:
    narrow = msgspec.structs.replace(
        NOISY, ranges=msgspec.structs.replace(NOISY.ranges, batch=Range(1, 2))
    )
    case = QUESTION.case(narrow, 0)
    with pytest.raises(CalibrationError, match=r"batch \d+ is outside of .* 1 to 2"):
        run(rig(narrow), PAIR, case, 6.0, 60, PROMISE, 0)
    marked = rig(narrow, extrapolates=True)
    run(marked, PAIR, case, 6.0, 60, PROMISE, 0)
    assert marked.ranges.outside["batch"][1] > 2


@pytest.mark.parametrize(
    ("most", "rate", "where"), [(3.0, 2.0, "crossing"), (1.5, 1.5, "above the rates")]
)
def test_rates_outside_of_the_calibration_only_bound_the_goodput(
    most: float, rate: float, where: str
) -> None:
    """Runs are as long as they need be for this: all is in time up to a rate, and nothing beyond.

    Beyond another one, batches are larger than any that was calibrated.
    """
    case, runs = QUESTION.case(NOISY, 0), {}
    for slow_s in (100.0, 0.001):
        runs[slow_s] = run(rig(), PAIR, case, 0.1, 10, Promise(slow_s, slow_s), 0)

    def runs_at(rate: float) -> list[Result]:
        if rate > most:
            raise BatchOutside(f"at {rate}")
        return [msgspec.structs.replace(runs[100.0 if rate <= 2.0 else 0.001], rate=rate)]

    found = find_goodput(runs_at, 8.0, 0.9, 1.05)
    assert found.goodput.where == where
    assert found.goodput.rate == pytest.approx(rate, rel=0.05)
    assert found.outside
    assert all(rate > most for rate in found.outside)
    assert all(of_rate[0].rate <= most for of_rate in found.runs)
    most = 0.0
    with pytest.raises(BatchOutside):
        find_goodput(runs_at, 8.0, 0.9, 1.05)


def test_the_command_answers_inside_of_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranges = msgspec.structs.replace(CORE.ranges, batch=Range(1, 4))
    write_calibration(msgspec.structs.replace(CORE, ranges=ranges), tmp_path / "node.json")
    command = ["simulate", "--calibration", str(tmp_path / "node.json"), "--modes", "colocated"]
    assert main([*command, "--requests", "20", "--ttft-s", "60", "--tpot-s", "1"]) == 0
    told = capsys.readouterr().out
    assert "or more" in told
    assert "batches are larger than any that was calibrated" in " ".join(told.split())


def test_a_client_that_is_the_limit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes 20 ms for a request, so at 50 a second it sends them late, whatever nodes do."""
    services = Services(client=ServiceTimes(request_s=0.02))
    sharing = msgspec.structs.replace(CORE.host, cores=4)
    slow = msgspec.structs.replace(CORE, services=services, host=sharing)
    write_calibration(slow, tmp_path / "node.json")
    command = ["simulate", "--calibration", str(tmp_path / "node.json"), "--modes", "colocated"]
    command += ["--one-host", "--scenario", "short-prompts", "--ttft-s", "2", "--tpot-s", "1"]
    assert main([*command, "--requests", "40"]) == 0
    told = capsys.readouterr().out
    assert "or more" in told
    assert "the load client is the limit" in " ".join(told.split())
    assert main([*command, "--requests", "40", "--rates", "60"]) != 0
    assert "the load client sends" in capsys.readouterr().err


def test_a_coordinator_that_takes_5_ms_a_request_limits_at_200_a_second() -> None:
    """Wherever the nodes are, and however many of them."""
    slow = Services(coordinator=ServiceTimes(request_s=0.005))
    for services, last_ms in ((Services(), 70), (slow, 750)):
        made = msgspec.structs.replace(CORE, services=services)
        case = Question("", "short-prompts", 0.0, 300).case(made, 0)
        calm = Promise(100.0, 1.0)
        found = run(rig(made), Deployment("colocated", 0, 32), case, 400.0, 300, calm, 0)
        assert found.score.ttft_ms.p99 == pytest.approx(last_ms, rel=0.1)
    assert found.services["coordinator"] == pytest.approx(1.5 / found.seconds)


@pytest.mark.parametrize(
    ("slow", "part"), [("prefill", "queue"), ("prefill", "prefill"), ("decode", "decode")]
)
def test_what_nodes_do_for_requests_has_its_part_of_their_cores(slow: str, part: str) -> None:
    """An event loop that takes 20 ms for each of 30 requests/s leaves steps the rest."""
    host = msgspec.structs.replace(CORE.host, cores=2)
    found: list[float] = []
    for times in (ServiceTimes(), ServiceTimes(request_s=0.02)):
        made = msgspec.structs.replace(CORE, services=Services(**{slow: times}), host=host)
        case = Question("", "short-prompts", 0.0, 100).case(made, 0)
        shared = replace(rig(made, extrapolates=True), one_host=True)
        parts = run(shared, PAIR, case, 30.0, 100, Promise(100.0, 1.0), 0).parts
        mean_ms = getattr(parts, part)
        assert mean_ms is not None
        found.append(mean_ms)
    assert found[1] > 1.25 * found[0]


def test_known_prompts_share_the_blocks_that_a_trace_says_they_share() -> None:
    """Blocks of 512 tokens in the trace, of 64 on the node; the last one is partial."""
    events = Events()
    nodes = [Node("decode-0", NodeRole.DECODE, Machine.of(CORE), events, PolicyConfig())]
    cluster = Cluster(events, nodes)
    seen: list[Outcome] = []
    sketches = [
        Sketch(0.0, "t", 0, 1200, 3, (7, 8, 9)),
        Sketch(20.0, "t", 1, 1200, 3, (7, 8, 10)),
        Sketch(40.0, "t", 2, 1200, 3),
    ]
    load = [call_of(sketch, sketch.at_s, 512, Slo()) for sketch in sketches]
    cluster.run(Coordinator(cluster, "colocated"), load, seen.append)
    assert [outcome.num_cached_tokens for outcome in seen] == [0, 1024, 0]
    one, other = (KnownPrompt(n, 1200, (7, 8, last), 512) for n, last in ((0, 9), (1, 10)))
    assert one[:1024] == other[:1024]
    assert one[1024:] != other[1024:]


def test_the_command_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, node = tmp_path / "small.jsonl", tmp_path / "node.json"
    rows = [
        {"timestamp": 3000 * i, "input_length": 600, "output_length": 20, "hash_ids": [0, i + 1]}
        for i in range(12)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    write_calibration(NOISY, node)
    command = ["simulate", "--trace", str(trace), "--calibration", str(node), "--scale", "2"]
    assert main([*command, "--modes", "adaptive", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["modes"][0]["rows"]
    assert row["score"]["finished"] == 12
    assert row["cached_tokens"] > 0
    assert report["card"]["device"] == CORE.device
    assert main([*command, "--modes", "adaptive"]) == 0
    assert "held-out errors of its step times: prefill unknown" in capsys.readouterr().out
    assert main([*command[:3], "--calibration", str(trace)]) == 2
    assert "is not a calibration" in capsys.readouterr().err


@pytest.mark.parametrize("strides", [True, False])
def test_a_follower_arrives_when_its_user_has_thought(strides: bool) -> None:
    events = Events()
    node = Node("d", NodeRole.DECODE, Machine.of(CORE), events, PolicyConfig(), strides=strides)
    cluster = Cluster(events, [node])
    seen: list[Outcome] = []
    sketches = [
        Sketch(0.0, "t", 0, 640, 50, (7,)),
        Sketch(0.0, "t", 1, 1280, 20, (7, 8), after=0, think_s=4.0),
        Sketch(0.0, "t", 2, 1920, 5, (7, 8, 9), after=1, think_s=0.0),
        Sketch(0.3, "t", 3, 100, 300),
    ]
    load = [call_of(sketch, sketch.at_s, 640, Slo()) for sketch in sketches]
    cluster.run(Coordinator(cluster, "colocated"), load, seen.append)
    ends = {outcome.call.call_id: outcome.token_times_s[-1] for outcome in seen}
    begins = {outcome.call.call_id: outcome.call.at_s for outcome in seen}
    assert begins["1"] == pytest.approx(ends["0"] + 4.0)
    assert begins["2"] == pytest.approx(ends["1"])
    assert begins["3"] == 0.3
    cached = {outcome.call.call_id: outcome.num_cached_tokens for outcome in seen}
    assert cached == {"0": 0, "1": 640, "2": 1280, "3": 0}


def test_calls_that_could_not_follow_in_time_are_unfinished() -> None:
    """As the client of a live run tells them: one thinks, and one waits for that one's end."""
    events = Events()
    node = Node("d", NodeRole.DECODE, Machine.of(CORE), events, PolicyConfig())
    cluster = Cluster(events, [node])
    seen: list[Outcome] = []
    sketches = [
        Sketch(0.0, "t", 0, 640, 5),
        Sketch(0.0, "t", 1, 1280, 5, after=0, think_s=4.0),
        Sketch(0.0, "t", 2, 1920, 5, after=1, think_s=1.0),
        Sketch(0.0, "t", 3, 100, 2000),
    ]
    load = [call_of(sketch, sketch.at_s, 640, Slo()) for sketch in sketches]
    cluster.run(Coordinator(cluster, "colocated"), load, seen.append, until_s=3.0)
    assert events.now() == 3.0
    assert [outcome.call.call_id for outcome in seen] == ["0"]
    unfinished = {outcome.call.call_id: outcome for outcome in cluster.unfinished()}
    assert set(unfinished) == {"1", "2", "3"}
    assert not any(outcome.has_ended for outcome in unfinished.values())
    assert unfinished["1"].token_times_s == unfinished["2"].token_times_s == []
    assert unfinished["3"].token_times_s[-1] > 2.9


def test_calls_that_would_follow_too_late_are_left_out() -> None:
    """With all behind them; one whose user has thought in time is not."""
    events = Events()
    node = Node("d", NodeRole.DECODE, Machine.of(CORE), events, PolicyConfig())
    cluster = Cluster(events, [node])
    seen: list[Outcome] = []
    sketches = [
        Sketch(0.0, "t", 0, 64, 5),
        Sketch(0.0, "t", 1, 128, 5, after=0, think_s=1.0),
        Sketch(0.0, "t", 2, 192, 5, after=1, think_s=4.0),
        Sketch(0.0, "t", 3, 256, 5, after=2, think_s=0.1),
        Sketch(0.0, "t", 4, 100, 2000),
    ]
    load = [call_of(sketch, sketch.at_s, 640, Slo()) for sketch in sketches]
    front = Coordinator(cluster, "colocated")
    cluster.run(front, load, seen.append, until_s=4.5, stop_s=3.0)
    assert [outcome.call.call_id for outcome in seen] == ["0", "1"]
    assert [outcome.call.call_id for outcome in cluster.unfinished()] == ["4"]


def test_each_rate_has_requests_of_its_own() -> None:
    """Else one unlucky series would move the whole curve, and no interval would show it."""
    case, ranges = QUESTION.case(NOISY, 0), Ranged(NOISY, extrapolates=True)

    def sent(rate: float) -> list[tuple[float, int]]:
        made = calls_of(case, rate, 20, None, ranges)
        return [(round(call.at_s * rate, 6), call.num_output) for call in made]

    assert sent(2.0) == sent(2.0)
    assert len({tuple(sent(rate)) for rate in (1.0, 1.5, 2.0, 3.0)}) == 4


def test_who_decides_knows_of_an_answer_only_how_long_it_may_get() -> None:
    """Unless its client asks for just as many tokens, as that of `bench compare`."""
    short, long = Sketch(0.0, "s", 0, 100, 5), Sketch(0.0, "l", 1, 100, 900)

    def sampling(sketch: Sketch, most_tokens: int) -> tuple[int, bool]:
        call = call_of(sketch, 0.0, 16, Slo(), most_tokens)
        sampling = request_of(call, Targets.of(call.slo, 0.0), 0.0).sampling
        return sampling.max_tokens, sampling.ignore_eos

    assert sampling(short, 1500) == sampling(long, 1500) == (1400, False)
    assert sampling(short, 0) == (5, True)
    assert sampling(long, 0) == (900, True)


def test_a_run_that_is_cut_scores_each_request_that_its_client_has() -> None:
    question = Question(trace="", scenario="chats", length_scale=0.0, count=60)
    case = question.case(NOISY, 0)
    sketches = [*case.workload.sketched(2.0, 60, turn_at(2.0))]
    patient = replace(rig(extrapolates=True), target=0.0)
    begun_s = max(sketch.at_s for sketch in sketches) + 1.0
    cut = run(patient, PAIR, case, 2.0, 60, PROMISE, 0, begun_s)
    assert cut.score.unfinished > 0
    assert cut.score.sent == len(sketches)
    assert cut.seconds == begun_s


def test_a_run_that_ends_before_it_would_be_cut_is_as_without_a_cut() -> None:
    case = QUESTION.case(NOISY, 0)
    free, cut = (run(rig(), PAIR, case, 1.0, 20, PROMISE, 0, end_s) for end_s in (inf, 1e5))
    assert cut.seconds == free.seconds < 1e3
    assert (cut.busy, cut.prompt_busy, cut.score) == (free.busy, free.prompt_busy, free.score)


def test_calls_that_hang_are_noticed_before_a_run_would_be_cut() -> None:
    class Forgets(Coordinator):
        def arrive(self, call: Call) -> None:
            pass

    events = Events()
    node = Node("d", NodeRole.DECODE, Machine.of(CORE), events, PolicyConfig())
    cluster = Cluster(events, [node])
    load = [call_of(Sketch(0.0, "t", 0, 640, 5), 0.0, 640, Slo())]
    with pytest.raises(AssertionError, match="1 calls never ended"):
        cluster.run(Forgets(cluster, "colocated"), load, lambda _: None, until_s=1e5)


def test_a_user_who_was_refused_goes_on_all_the_same() -> None:
    class Refuses(Coordinator):
        def arrive(self, call: Call) -> None:
            if call.call_id == "0":
                self._cluster.refuse(call)
            else:
                super().arrive(call)

    events = Events()
    cluster = Cluster(
        events, [Node("d", NodeRole.DECODE, Machine.of(CORE), events, PolicyConfig())]
    )
    seen: list[Outcome] = []
    sketches = [
        Sketch(1.0, "t", 0, 640, 50),
        Sketch(1.0, "t", 1, 1280, 20, after=0, think_s=4.0),
    ]
    load = [call_of(sketch, sketch.at_s, 640, Slo()) for sketch in sketches]
    cluster.run(Refuses(cluster, "colocated"), load, seen.append)
    assert [outcome.was_refused for outcome in seen] == [True, False]
    assert seen[1].call.at_s == 5.0
