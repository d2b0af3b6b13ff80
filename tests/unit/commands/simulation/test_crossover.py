"""`pdserve bench crossover`: its matrix, where modes cross, and that a stopped run goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.commands.bench.compare.clusters import Clusters
from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.compare.goodput import Goodput, RatePoint
from pdserve.commands.bench.compare.runner import Candidate
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.scenarios import SHORT_PROMPTS
from pdserve.commands.bench.load.workload import SyntheticWorkload
from pdserve.commands.cli.main import main
from pdserve.commands.simulation.calibrate import run as calibrating
from pdserve.commands.simulation.calibrate.config import CalibrateConfig
from pdserve.commands.simulation.crossover import plot
from pdserve.commands.simulation.crossover import run as crossover
from pdserve.commands.simulation.crossover.bands import bands, curve_of
from pdserve.commands.simulation.crossover.cells import CELLS, FORMATS, Cell, Formats
from pdserve.commands.simulation.crossover.config import CrossoverConfig, CrossoverPlan
from pdserve.commands.simulation.crossover.measure import Measured, modes_of, splits_of
from pdserve.commands.simulation.crossover.predict import (
    Predicted,
    Predictor,
    Sized,
    Tried,
    climbed,
)
from pdserve.commands.simulation.crossover.results import CellResult, CrossoverReport
from pdserve.commands.simulation.crossover.table import crossing, goodputs, ratio
from pdserve.commands.simulation.crossover.texts import Guessed, WrittenWorkload
from pdserve.commands.simulation.machine import scaled
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.deployment import Deployment
from pdserve.commands.simulation.predict.parallel import in_parallel
from pdserve.measured.calibration import Calibration, HeldOutErrors
from pdserve.settings.config import EngineConfig, Mode
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK, USERS_FAULT
from tests.matrix import matrix

CORE = load_calibration("core-53m")
PROMISE = Promise(1.0, 0.02)
SETUP: dict[str, object] = {
    "at": "2026-11-30",
    "kernels": "avx2",
    "machine": {"processor": "a processor", "cores": "2"},
}


def tried(mode: Mode, prefill: int, decode: int, goodput: float) -> Tried:
    curve = [(goodput / 2, 1.0), (goodput, 0.9), (2 * goodput, 0.1)]
    found = Goodput(goodput, "crossing", 0.9 * goodput, 1.1 * goodput)
    return Tried(Deployment(mode, prefill, decode), found, curve)


# ---- the matrix ----------------------------------------------------------------------------------


def test_a_cell_is_its_formats_and_drafts() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS) == 12
    engines = {formats.name: formats.engine(EngineConfig()) for formats in FORMATS}
    told = {name: (e.dtype, e.quantization, e.kv_dtype) for name, e in engines.items()}
    assert told["bf16-kv-bf16"] == ("bfloat16", "none", "auto")
    assert told["int4-kv-int8"] == ("bfloat16", "int4", "int8")
    sizes = {(e.threads, e.kv_memory) for e in engines.values()}
    assert sizes == {(1, "512MiB")}, "cells differ in their formats alone"
    plain, guessing = (Cell(FORMATS[0], drafts).speculation for drafts in (False, True))
    assert (plain.mode, guessing.mode) == ("off", "auto")


def test_clusters_of_a_comparison_guess_as_they_are_told() -> None:
    config = CompareConfig(speculation=Cell(FORMATS[0], False).speculation)
    clusters = Clusters(config, "model", lambda *_: None, lambda _: None)
    started = clusters.cluster_config(Candidate("adaptive"), None)
    assert started.speculation == config.speculation != CompareConfig().speculation


@pytest.mark.parametrize(
    ("flags", "complaint"),
    matrix(
        [
            (["--shape=7b"], "there are demo-14m, 25m"),
            (["--set", "engine.quantization=int8"], "engine.quantization: cells have formats"),
            (["--set", "engine.device=cuda"], "engine.device: cells have formats"),
            (["--out=/dev/null/x"], "cannot be used"),
        ],
        2,
    ),
)
def test_the_users_fault_is_told_before_anything_starts(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "crossover", *flags]) == USERS_FAULT
    assert complaint in capsys.readouterr().err


def test_written_prompts_have_the_lengths_and_times_of_the_scenario() -> None:
    random = SyntheticWorkload(SHORT_PROMPTS, 0)
    written = WrittenWorkload(random, range(1000, 1050))
    ours, theirs = written.timed(2.0, 20, 1, contents=3), random.timed(2.0, 20, 1, contents=3)
    assert [(r.at_s, len(r.prompt), r.num_output) for r in ours] == [
        (r.at_s, len(r.prompt), r.num_output) for r in theirs
    ]
    prompt = ours[0].prompt
    text = [1000 + (prompt[0] - 1000 + i) % 50 for i in range(len(prompt))]
    assert prompt == text, "a piece of the text, which begins anew where it ends"
    assert written.timed(2.0, 20, 1, contents=3) == ours
    assert written.timed(2.0, 20, 1, contents=4) != ours


# ---- what is found -------------------------------------------------------------------------------


def test_modes_cross_where_one_keeps_less_than_another() -> None:
    curves = {
        "early": curve_of([RatePoint(1.0, {"": (100, 100)}), RatePoint(3.0, {"": (80, 100)})]),
        "late": curve_of([RatePoint(1.0, {"": (92, 100)}), RatePoint(3.0, {"": (92, 100)})]),
    }
    first, both, last = bands(curves)
    assert [band.best for band in (first, both, last)] == [["early"], ["early", "late"], ["late"]]
    assert both.rate == pytest.approx(1.5, abs=0.02)  # 95 % against 92 %
    assert last.rate == pytest.approx(2.1, abs=0.02)  # 89 %
    assert bands({"none": []}) == []


def test_loads_that_no_mode_keeps_are_left_out() -> None:
    found = bands({"one": [(1.0, 1.0), (10.0, 0.1)], "other": [(1.0, 1.0), (10.0, 0.2)]})
    assert [band.best for band in found] == [["one", "other"]]


@pytest.mark.parametrize("top", [1, 4, 11])
def test_the_best_ratio_is_climbed_to(top: int) -> None:
    asked: list[int] = []

    def at(prefill: int) -> Tried:
        asked.append(prefill)
        return tried("disaggregated", prefill, 12 - prefill, 20.0 - abs(prefill - top))

    found = climbed(at, 5, 11)
    assert max(found, key=lambda one: one.goodput.rate).deployment.prefill == top
    assert len(asked) == len(set(asked)) <= 3 + abs(top - 5)
    assert {top - 1, top + 1} & {*range(1, 12)} <= {*asked}, "those beside it, too"


def test_cheaper_decode_leaves_more_nodes_for_prompts() -> None:
    plan = CrossoverPlan(
        sizes=(), here=2, length_scale=0.05, calibrate_s=1.0, requests=26, close=1.5,
        climbs=False, texts=1, measure_s=1.0, budget_s=1.0,
    )  # fmt: skip
    cheap = msgspec.structs.replace(CORE, decode=scaled(CORE.decode, 0.3), believed=None,
                                    mixed=scaled(CORE.mixed, 0.3))  # fmt: skip

    def share(calibration: Calibration) -> float:
        knee = Predictor(calibration, 0.0, "short-prompts", plan, PROMISE).knee
        return knee.decode_per_s / (knee.prefill_per_s + knee.decode_per_s)

    assert share(CORE) < share(cheap)


def test_ratios_beside_the_best_are_measured_after_it() -> None:
    split = [tried("disaggregated", p, 4 - p, 10.0 - abs(p - 2)) for p in (1, 2, 3)]
    found = made(4, split)
    assert splits_of(found) == [(2, 2), (1, 3), (3, 1)]
    assert set(modes_of(2, 2, is_first=True)) > {"colocated", "multiplexed", "adaptive"}
    assert not {"colocated", "multiplexed"} & set(modes_of(1, 3, is_first=False))


def test_what_is_told_of_a_size() -> None:
    some = [tried("disaggregated", p, 8 - p, rate) for p, rate in ((4, 9.8), (5, 10.0), (6, 7.0))]
    sized = Sized(8, [*some, tried("adaptive", 5, 3, 12.0), tried("colocated", 0, 8, 2.0)])
    assert ratio(sized) == "8: 5P3D or 4P4D 10; best adaptive 5P3D 12"
    below = Tried(some[0].deployment, Goodput(0.0, "below the rates", 0.0, None), some[0].curve)
    assert goodputs(Sized(8, [below])) == "disaggregated 4P4D < 4.9"
    told = crossing(sized).splitlines()
    assert told[0] == "all alike"
    assert told[-1].endswith(": adaptive")


# ---- a run ---------------------------------------------------------------------------------------


def made(nodes: int = 2, split: Sequence[Tried] = ()) -> Predicted:
    here = [*(split or [tried("disaggregated", 1, 1, 10.0)]), tried("colocated", 0, nodes, 4.0)]
    return Predicted(
        errors=HeldOutErrors(None, None, None, None),
        drafts_right=0.0,
        decode_ms=5.0,
        prompt_ms=50.0,
        here=Sized(nodes, here),
        sizes=[Sized(8, [tried("disaggregated", 5, 3, 40.0)])],
        outside={},
    )


def measurement(num_different: int) -> Measured:
    return Measured(
        split=(1, 1),
        here=made().here,
        verdicts=["cannot tell"],
        answers="40 answers were compared",
        num_different=num_different,
        failures={},
        load_average=0.1,
    )


class Machine:
    """Everything that takes long, played and counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.ends_with: dict[int, BaseException] = {}  # number of a measurement |-> instead of it
        self.num_different = 0
        patch.setattr(calibrating, "measured", self._calibrated)
        patch.setattr(crossover, "baseline_promise", lambda *_: PROMISE)
        patch.setattr(crossover, "guessed", self._guessed)
        patch.setattr(crossover, "in_parallel", self._in_parallel)
        patch.setattr(crossover, "measured", self._measured)
        patch.setattr(plot, "save_plot", self._plotted)

    def _calibrated(self, config: CalibrateConfig) -> Calibration:
        self.calls["calibrated"] += 1
        return CORE

    def _plotted(self, report: CrossoverReport, folder: Path) -> Path:
        self.calls["plotted"] += 1
        return folder / "crossover.png"

    def _guessed(self, *_: object) -> Guessed:
        self.calls["guessed"] += 1
        return Guessed("demo", 100, 40)

    def _in_parallel(
        self, work: Callable[[Any], Any], asked: Sequence[Any]
    ) -> Iterator[tuple[Cell, Guessed | None, Predicted]]:
        for cell, found, _ in asked:
            self.calls["predicted"] += 1
            yield cell, found, made()

    def _measured(self, config: object, cell: Cell, *_: object) -> Measured:
        self.calls["measured"] += 1
        if error := self.ends_with.get(self.calls["measured"]):
            raise error
        return measurement(self.num_different)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def run(folder: Path, **asked: Any) -> int:
    return crossover.run(CrossoverConfig(quick=True, out=str(folder), **asked), SETUP)


def test_a_run_that_was_stopped_goes_on(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ends_with = {3: KeyboardInterrupt()}
    assert run(tmp_path) == FORCED
    machine.ends_with = {}
    assert run(tmp_path, json=True) == OK
    # Of the drafts of random weights nothing is measured; the third measurement was made again.
    counts = {"calibrated": 6, "guessed": 6, "predicted": 12, "measured": 7, "plotted": 2}
    assert machine.calls == counts
    cells = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert [len(cell["measured"]) for cell in cells] == [1] * 6 + [0] * 6
    with tarfile.open(tmp_path / "crossover.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"int4-kv-int8-drafts.json", "int4-kv-int8.json", "report.json"} <= names
    lines = (tmp_path / "table.md").read_text().splitlines()
    row = "| disaggregated 10; disaggregated 10 | 4; 4 | 8: 5P3D 40 |"
    assert lines[2] == f"| bf16, bf16 | none | 5.00; 50.0 {row}"
    assert lines[-1].startswith("| int4, int8 | 1.67 tokens/step | 5.00; 50.0 | disaggregated 10 |")


def test_measurements_may_follow_later_and_failed_ones_do(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, predicted_only=True) == OK
    calls = machine.calls
    assert calls["measured"] == 0
    machine.ends_with = {2: ClusterError("no node is left")}
    assert run(tmp_path) == FAILED
    assert "bf16-kv-int8-plain was not measured: no node is left" in capsys.readouterr().out
    assert calls["measured"] == 6, "the others were"
    assert run(tmp_path) == OK
    assert calls["measured"] == 7


def test_other_answers_fail_a_run(machine: Machine, tmp_path: Path) -> None:
    machine.num_different = 1
    assert run(tmp_path) == FAILED


def test_results_of_another_question_are_not_mixed(machine: Machine, tmp_path: Path) -> None:
    assert run(tmp_path, predicted_only=True) == OK
    with pytest.raises(ConfigError, match="has results with another scenario: name a new"):
        run(tmp_path, predicted_only=True, scenario="conversation")


@pytest.mark.long
def test_a_process_that_dies_is_told_and_ends_those_of_the_same_work() -> None:
    before = multiprocessing.active_children()
    other = multiprocessing.get_context("spawn").Process(target=signal.pause)
    other.start()
    try:
        assert sorted(in_parallel(abs, [-2, -1])) == [1, 2]
        with pytest.raises(ClusterError, match="a process that predicts has died"):
            list(in_parallel(os._exit, [1, 1]))
        assert set(multiprocessing.active_children()) == {*before, other}
    finally:
        other.terminate()
        other.join(10.0)


@pytest.mark.long  # matplotlib is slow to load
def test_everything_known_is_plotted(tmp_path: Path) -> None:
    cell = CellResult(
        cell=CELLS[0], revision="", promise=PROMISE, guessed=None, predicted=made(),
        measured=[measurement(0)],
    )  # fmt: skip
    report = CrossoverReport(
        model="50m", scenario="conversation", length_scale=1.0, random_right=0.0, cells=[cell],
        failures={},
    )  # fmt: skip
    assert plot.save_plot(report, tmp_path).stat().st_size > 10_000


def test_a_name_says_what_is_asked() -> None:
    asked = CrossoverConfig(model="/models/some-7b", scenario="conversation", quick=True)
    assert asked.folder == Path("bench-crossover/some-7b-conversation-quick")
    assert Formats("int8", "bf16").name == "int8-kv-bf16"
