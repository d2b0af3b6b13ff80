"""The report of `pdserve bench prediction`: which errors it counts, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pdserve.commands.bench.compare.goodput import RatePoint
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.commands.bench.load.slo_score import Score, score
from pdserve.commands.cli.main import main
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.deployment import Deployment, Rig
from pdserve.commands.simulation.predict.load import Question
from pdserve.commands.simulation.predict.parts import Parts
from pdserve.commands.simulation.validate import run as validating
from pdserve.commands.simulation.validate.ahead import Ahead, Asked, Paced, at_pace
from pdserve.commands.simulation.validate.config import PredictionConfig
from pdserve.commands.simulation.validate.regret import regret_table, regrets_of, said
from pdserve.commands.simulation.validate.report import PredictionReport, parts_table, table
from pdserve.commands.simulation.validate.row import Figures, Row
from pdserve.commands.simulation.validate.run import _paces, beyond
from pdserve.measured.calibration import HeldOutErrors
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import FAILED, FORCED
from tests.matrix import matrix


def figures(attainment: float, ttft_p99: float) -> Figures:
    """Figures of a run with an interval of 5 points to each side."""
    low, high = attainment - 0.05, min(1.0, attainment + 0.05)
    return Figures(attainment, low, high, ttft_p99 / 4, ttft_p99, 6.0, 9.0)


def parts(decode_step: float | None) -> Parts:
    """Parts of which only the steps vary."""
    return Parts(
        queue=20.0,
        prefill=30.0,
        handoff=None,
        decode=400.0,
        steps={"prefill": 50.0, "decode": decode_step, "mixed": None},
        num_steps={"prefill": 10, "decode": 90, "mixed": 0},
    )


REPORT = PredictionReport(
    rows=[
        Row(
            load="a trace",
            ttft_s=1.0,
            tpot_s=0.02,
            deployment="colocated 2",
            rates=[1.0, 2.0, 3.0],
            predicted=[figures(0.99, 100.0), figures(0.92, 200.0), figures(0.80, 400.0)],
            measured=[figures(0.93, 125.0), figures(0.90, 800.0), figures(0.81, 900.0)],
            predicted_kinds=[[{"turn": (met, 100)}] * 5 for met in (99, 92, 80)],
            predicted_ttft_p99=[(90.0, 130.0), (190.0, 700.0), (390.0, 1000.0)],
            measured_kinds=[{"turn": (93, 100)}, {"turn": (90, 100)}, {"turn": (81, 100)}],
            client_kept_up=[True, True, True],
            others=[0.0, 0.09, 0.02],
            pace=[1.08, None, 0.95],
            drift=[0.02, 0.0, 0.09],
            predicted_parts=[parts(5.0), parts(5.5), parts(12.3)],
            measured_parts=[parts(6.0), parts(None), parts(6.6)],
            predicted_goodput=2.3,
            paced_goodput=2.2,
            measured_goodput=2.0,
        )
    ],
    regrets=[],
    errors=HeldOutErrors(0.03, None, 0.05, 0.1),
    outside={"batch": (20, 30)},
)


def shown(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_errors_below_the_knee_are_those_where_either_says_so() -> None:
    """Otherwise a prediction would be spared that says "in time" of a rate that is not."""
    remarks = "\n".join(REPORT.remarks)
    assert "error of attainment, points: median 2.0, worst 6.0, of 3" in remarks
    assert "error of attainment below the knee: median 6.0, worst 6.0, of 1" in remarks
    assert "2 of 3 attainments lie within the measured 95 % intervals" in remarks
    assert "error of TTFT p99 below the knee: median 20.0%, worst 20.0%, of 1" in remarks
    assert "median 10.0%, worst 10.0%, of 1" in remarks  # goodput
    assert (
        "2 of 3 TTFT p99 lie within those of the simulated runs; were the prediction perfect, 2 "
        "would"
    ) in remarks
    assert "took 1.02 times as long as calibrated in the median, 0.95 to 1.08" in remarks
    assert "OUTSIDE the calibration: batch from 20 to 30" in remarks


@pytest.mark.parametrize(
    ("changed", "mark", "told"),
    [
        ({"client_kept_up": [True, True, False]}, "client's limit", "the load client is the limit"),
        ({"others": [0.0, 0.0, 0.2]}, "others' load", "processes of others had more than a tenth"),
        ({"drift": [0.0, 0.0, 0.2]}, "another pace", "the idle cluster's pace changed by more"),
    ],
)
def test_where_the_nodes_are_not_the_limit_nothing_is_compared(
    changed: dict[str, Any], mark: str, told: str
) -> None:
    (row,) = REPORT.rows
    row = msgspec.structs.replace(row, **changed)
    report = msgspec.structs.replace(REPORT, rows=[row])
    remarks = "\n".join(report.remarks)
    assert "error of attainment, points: median 4.0, worst 6.0, of 2" in remarks
    assert "1 of 2 TTFT p99 lie within" in remarks
    assert f"at 1 of 3 rates {told}" in remarks
    assert shown(table(report)).count(mark) == 1
    assert [point.rate for point in row.points] == [1.0, 2.0]


def test_the_tables_have_a_row_for_each_rate() -> None:
    compared, where = shown(table(REPORT)), shown(parts_table(REPORT))
    assert "99 / 93 (88-98)" in compared
    assert "2.20 / 2.00" in compared
    assert "5.00 / 6.00" in where
    assert "5.50 / -" in where
    assert "12.3 / 6.60" in where
    assert "x 1.08" in where


def test_a_run_in_which_nothing_is_answered_has_no_latencies() -> None:
    """Not ones of 0 ms, which would lie within those of the simulated runs, or outside."""
    nothing = Figures.of(_unanswered())
    assert nothing.ttft_p99 is nothing.tpot_p50 is None
    assert Figures.between([scored(100.0, 0), _unanswered()]).ttft_p99 is None
    (row,) = REPORT.rows
    row = msgspec.structs.replace(
        row,
        measured=[nothing, *row.measured[1:]],
        predicted_ttft_p99=[(0.0, 130.0), *row.predicted_ttft_p99[1:]],
    )
    report = msgspec.structs.replace(REPORT, rows=[row])
    assert "1 of 2 TTFT p99 lie within" in "\n".join(report.remarks)
    assert "error of TTFT p99 below the knee: none was comparable" in "\n".join(report.remarks)
    assert "100 / -" in shown(table(report))


@pytest.mark.parametrize(
    ("words", "told"),
    matrix(
        [
            ("--traces /nowhere.jsonl", "cannot read the trace /nowhere.jsonl"),
            (
                "--calibration core-53m --scenarios conversation --deployments 1P1D --requests 10 "
                "--ttft-s 1e-4 --tpot-s 1e-5",
                "conversation, disaggregated 1P1D: no rate is predicted at which TTFT 0.0001 s and "
                "TPOT 1e-05 s are just kept: its goodput is below the rates; give another --ttft-s",
            ),
        ],
        1,
    ),
)
def test_what_leads_nowhere_is_told_before_anything_is_measured(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prediction", *words.split()]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_run_is_predicted_for_the_pace_that_the_machine_had_around_it() -> None:
    config = PredictionConfig(requests=10)
    asked = Asked(
        config,
        load_calibration("core-53m"),
        Question("", "conversation", 0.0, config.requests),
        Deployment("disaggregated", 1, 1),
        Promise(2.0, 0.05),
    )
    of_rate = [at_pace(Paced(asked, 0.2, pace)) for pace in (1.0, 2.0)]
    assert [rate for rate, _ in of_rate] == [0.2, 0.2]
    usual, slow = (
        Parts.between([run.parts for run in runs]).steps["prefill"] for _, runs in of_rate
    )
    assert usual is not None
    assert slow == pytest.approx(2 * usual, rel=0.1)
    assert _paces(1.0, 1.2) == (pytest.approx(1.1), pytest.approx(0.2))
    assert _paces(None, 0.9) == (0.9, 0.0)
    assert _paces(None, None) == (None, 0.0)


@pytest.mark.long
def test_a_case_whose_promises_are_never_kept_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two promises can be kept."""

    def started(*_: object, **__: object) -> None:
        raise ClusterError("a cluster was started")

    monkeypatch.setattr(validating, "Cluster", started)
    words = (
        "--calibration core-53m --scenarios conversation --deployments 1P1D --requests 10 "
        "--ttft-s 2 --tpot-s 0.05 --promise-factors 1,1e-4"
    )
    assert main(["bench", "prediction", *words.split()]) == FAILED
    told = " ".join(capsys.readouterr().err.split())
    assert "left out: conversation, disaggregated 1P1D: no rate is predicted" in told
    assert told.endswith("a cluster was started")


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        (ClusterError("cannot read a node"), FAILED, "cannot read a node; these are"),
        (KeyboardInterrupt(), FORCED, "interrupted: these are"),
    ],
)
def test_what_was_measured_before_an_end_is_reported(
    end: BaseException,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the regret of cases of which all deployments were measured."""
    measured = [measured_row(name, 9.0, {8.0: 950, 12.0: 800}) for name in ("1P1D", "2P1D", "1P1D")]
    left = iter([*measured, end])

    def measure(*_: object) -> Row:
        of_next = next(left)
        if isinstance(of_next, BaseException):
            raise of_next
        return of_next

    def predicted(asked: Sequence[Asked], _: Rig) -> list[Ahead]:
        return [Ahead(one, 9.0, {}, {}) for one in asked]

    monkeypatch.setattr(validating, "_predicted", predicted)
    monkeypatch.setattr(validating, "_row", measure)
    words = (
        "--calibration core-53m --scenarios conversation --deployments 1P1D,2P1D --requests 10 "
        "--ttft-s 2 --tpot-s 0.05 --promise-factors 1,2 --json"
    )
    assert main(["bench", "prediction", *words.split()]) == code
    printed = capsys.readouterr()
    assert told in printed.err
    assert "this takes at least" in printed.err
    report = json.loads(printed.out)
    assert (len(report["rows"]), len(report["regrets"])) == (3, 1)


def measured_row(
    deployment: str,
    predicted_goodput: float,
    in_time: dict[float, int],
    load: str = "a trace",
    sent: int = 1000,
    simulated: Sequence[int] = (),
) -> Row:
    """A row of which only the goodputs matter: requests in time at each rate, of so many.

    `simulated`: requests in time of the simulated runs at each rate.
    """
    return Row(
        load=load,
        ttft_s=1.0,
        tpot_s=0.02,
        deployment=deployment,
        rates=list(in_time),
        predicted=[],
        predicted_kinds=[[{"turn": (met, sent)} for met in simulated] for _ in in_time],
        predicted_ttft_p99=[],
        measured=[],
        measured_kinds=[{"turn": (met, sent)} for met in in_time.values()],
        predicted_parts=[],
        measured_parts=[],
        client_kept_up=[True] * len(in_time),
        others=[0.0] * len(in_time),
        pace=[None] * len(in_time),
        drift=[0.0] * len(in_time),
        predicted_goodput=predicted_goodput,
        paced_goodput=None,
        measured_goodput=None,
    )


def test_regret_is_what_the_choice_loses_to_the_best_measured_one() -> None:
    rows = [
        measured_row("1P1D", 12.0, {8.0: 1000, 12.0: 800}),  # 10
        measured_row("colocated 2", 11.0, {8.0: 950, 16.0: 850}),  # 12
        measured_row("adaptive 1P1D", 3.0, {8.0: 800, 12.0: 700}),  # below the rates
        measured_row("1P1D", 5.0, {4.0: 1000, 6.0: 800}, load="another"),  # 5
        measured_row("colocated 2", 4.0, {4.0: 990, 6.0: 800}, load="another"),  # 4.95
    ]
    wrong, right = regrets_of(rows, 0.9)
    assert (wrong.chosen, wrong.best) == ("1P1D", "colocated 2")
    assert wrong.regret == pytest.approx(1 - 10 / 12)
    assert wrong.certainty < 0.05
    assert not wrong.is_close
    assert (right.chosen, right.best, right.regret) == ("1P1D", "1P1D", 0.0)
    assert right.certainty > 0.9
    assert "1 of 2 cases" in said([wrong, right])[0]
    assert "16.7%" in said([wrong, right])[0]
    assert "16.7%" in shown(regret_table([wrong, right]))


def test_regret_is_unknown_where_another_one_was_not_measured_to_its_end() -> None:
    """Of what lies above the rates nobody knows by how much, unless that is the chosen one."""
    above = {8.0: 1000, 12.0: 950}
    rows = [measured_row("1P1D", 12.0, {8.0: 1000, 12.0: 800}), measured_row("2P1D", 9.0, above)]
    (unknown,) = regrets_of(rows, 0.9)
    assert unknown.regret is None
    assert not unknown.is_close
    assert "?" in shown(regret_table([unknown]))
    rows[1] = measured_row("2P1D", 13.0, above)
    (best,) = regrets_of(rows, 0.9)
    assert (best.chosen, best.regret) == ("2P1D", 0.0)


def test_chance_is_another_one_for_each_deployment() -> None:
    """Else those that were measured to be equal would be equal for certain."""
    curve = {8.0: 98, 12.0: 80}
    rows = [measured_row(name, 10.0, curve, sent=100) for name in ("1P1D", "2P1D", "1P2D")]
    (found,) = regrets_of(rows, 0.9)
    assert found.regret == 0.0
    assert 0.3 < found.certainty < 0.75
    assert found.unknown < 0.05


def test_where_late_requests_come_together_less_is_certain() -> None:
    """Rates are measured once, so simulated runs tell how much equal ones differ."""
    better, worse = {8.0: 990, 12.0: 800}, {8.0: 950, 12.0: 700}

    def certainty(simulated: Sequence[int]) -> float:
        rows = [
            measured_row("1P1D", 11.0, better, simulated=simulated),
            measured_row("2P1D", 10.0, worse, simulated=simulated),
        ]
        return regrets_of(rows, 0.9)[0].certainty

    alike = certainty([900, 910, 890, 905, 895])
    assert alike > 0.99
    assert certainty([990, 700, 950, 800, 1000]) < 0.95


BELOW, ABOVE = {8.0: 500, 12.0: 400}, {8.0: 1000, 12.0: 1000}


@pytest.mark.parametrize("both", [BELOW, ABOVE], ids=["below", "above"])
def test_which_of_two_beyond_the_rates_is_the_better_one_is_unknown(both: dict[float, int]) -> None:
    rows = [measured_row("1P1D", 12.0, both), measured_row("2P1D", 9.0, both)]
    (found,) = regrets_of(rows, 0.9)
    assert (found.regret, found.certainty, found.unknown) == (None, 0.0, 1.0)
    assert not found.is_close
    assert "0%-100%" in shown(regret_table([found]))


def test_of_a_choice_below_the_rates_only_a_bound_of_its_regret_is_known() -> None:
    """It is lost for certain only where the best one is above the lowest of its rates."""
    rows = [measured_row("1P1D", 12.0, BELOW), measured_row("2P1D", 9.0, {8.0: 1000, 12.0: 800})]
    (lost,) = regrets_of(rows, 0.9)
    assert (lost.regret, lost.certainty, lost.unknown) == (None, 0.0, 0.0)
    rows[1] = measured_row("2P1D", 9.0, {4.0: 1000, 7.0: 500})
    (unknown,) = regrets_of(rows, 0.9)
    assert (unknown.regret, unknown.certainty, unknown.unknown) == (None, 0.0, 1.0)


def test_one_deployment_is_no_choice() -> None:
    assert regrets_of(REPORT.rows, 0.9) == []
    assert said([]) == []


def _unanswered() -> Score:
    """A run that nobody has answered."""
    sent = Outcome(kind="any", due_s=0.0, num_prompt=10, num_output=5)
    return score([sent], Promise(0.5, 0.01), 0.9)


def scored(ttft_ms: float, num_late: int) -> Score:
    """A run of 100 requests, of which some are late."""
    outcomes = [
        Outcome(
            kind="any",
            due_s=0.0,
            num_prompt=10,
            num_output=1,
            arrivals_s=[1.0 if number < num_late else ttft_ms / 1e3],
            num_received=1,
            end="finished",
        )
        for number in range(100)
    ]
    return score(outcomes, Promise(0.5, 0.01), 0.9)


def test_latencies_of_several_runs_are_those_of_the_one_in_the_middle() -> None:
    """One run in which requests are served last, and so wait much longer, moves no tail."""
    runs = [scored(100.0, 0), scored(110.0, 0), scored(120.0, 6)]
    between = Figures.between(runs)
    assert between.attainment == pytest.approx(0.98)
    assert between.ttft_p99 == pytest.approx(110.0)
    assert between.ttft_p50 == pytest.approx(110.0)


def test_rates_go_on_until_the_goodput_lies_between_two() -> None:
    def next_of(*in_time: int) -> list[float]:
        met = enumerate(in_time, start=1)
        return beyond([RatePoint(float(rate), {"turn": (num, 100)}) for rate, num in met], 0.9)

    assert next_of(95, 80) == []
    (higher,) = next_of(99, 95)
    (lower,) = next_of(85, 50)
    assert 2.0 < higher < 4.0
    assert 0.5 < lower < 1.0
