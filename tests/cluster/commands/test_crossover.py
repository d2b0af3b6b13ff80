"""`pdserve bench crossover` on real clusters: one pair of formats, as small as it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.commands.cli.conditions import conditions
from pdserve.commands.simulation.crossover import results
from pdserve.commands.simulation.crossover import run as crossover
from pdserve.commands.simulation.crossover.cells import Cell, Formats
from pdserve.commands.simulation.crossover.config import CrossoverConfig, CrossoverPlan
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.settings.config import EngineConfig
from pdserve.shared.process.exit_codes import OK

TINY = CrossoverPlan(
    sizes=(3,), here=2, length_scale=1.0, calibrate_s=9.0, requests=20, close=2.0,
    climbs=False, texts=6, measure_s=30.0, budget_s=600.0,
)  # fmt: skip
CELLS = [Cell(Formats("int8", "int8"), drafts) for drafts in (False, True)]


@pytest.mark.long
@pytest.mark.timeout(3600)  # some twenty clusters, one after the other
def test_formats_of_the_demo_model_are_calibrated_predicted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CrossoverConfig, "plan", TINY)
    for module in (crossover, results):
        monkeypatch.setattr(module, "CELLS", CELLS)
    monkeypatch.setattr(crossover, "FORMATS", [CELLS[0].formats])
    config = CrossoverConfig(
        model=str(CHECKPOINT_PATH), scenario="short-prompts", out=str(tmp_path),
        engine=EngineConfig(kernels="portable"),
    )  # fmt: skip
    assert crossover.run(config, conditions(config)) == OK
    plain, guessing = results.Results(config, conditions(config)).cells()
    assert guessing.guessed is not None
    assert guessing.predicted.drafts_right == guessing.guessed.share > 0, "text can be guessed"
    for cell in (plain, guessing):
        (measured,) = cell.measured
        assert {one.deployment.mode for one in measured.here.tried} == {
            "disaggregated", "colocated", "adaptive", "flowing", "multiplexed",
        }  # fmt: skip
        assert "are the same" in measured.answers
