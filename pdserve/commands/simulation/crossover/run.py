"""`pdserve bench crossover`: calibrates, predicts and measures each cell, and goes on after a stop.

Each pair of formats is calibrated once: drafts change how many tokens a step has, not what they
take. Then all cells are predicted, on all cores; then measured, one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Final

import msgspec

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.commands.simulation.calibrate import run as calibrating
from pdserve.commands.simulation.calibrate.config import CalibrateConfig
from pdserve.commands.simulation.crossover.cells import CELLS, FORMATS, Cell, Formats
from pdserve.commands.simulation.crossover.config import CrossoverConfig, CrossoverPlan
from pdserve.commands.simulation.crossover.measure import measured, modes_of, splits_of
from pdserve.commands.simulation.crossover.predict import Predicted, baseline_promise, predicted
from pdserve.commands.simulation.crossover.results import CellResult, CrossoverReport, Results
from pdserve.commands.simulation.crossover.table import markdown, remarks, table
from pdserve.commands.simulation.crossover.texts import Guessed, guessed, text_ids
from pdserve.commands.simulation.predict.parallel import in_parallel
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.measured.calibration import Calibration
from pdserve.shared.errors import PdserveError
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK

_DEMO: Final = (str(CHECKPOINT_PATH), 1.0)  # and the factor on lengths


def run(config: CrossoverConfig, setup: dict[str, object]) -> int:
    """Find out what is not known yet, and tell all; the exit code.

    It is 1 if a cell could not be measured, or modes gave different answers. Ctrl-C ends it early:
    what is known until then is told, and the next run goes on.

    Raises:
        PdserveError: the settings contradict each other, or nodes cannot be calibrated.
    """
    plan, exit_code = config.plan, OK
    crossover = Crossover(config, plan, Results(config, setup), setup)
    try:
        crossover.predict()
        if not config.predicted_only:
            crossover.measure()
    except KeyboardInterrupt:
        if not crossover.results.cells():
            raise
        say("interrupted: the same command goes on from here")
        exit_code = FORCED
    report = crossover.report()
    _show(report, crossover.results, setup, as_json=config.json)
    return exit_code or (OK if report.is_sound else FAILED)


class Crossover:
    """One run."""

    def __init__(
        self,
        config: CrossoverConfig,
        plan: CrossoverPlan,
        results: Results,
        setup: dict[str, object],
    ) -> None:
        self.results = results
        self._config = config
        self._plan = plan
        self._setup = setup
        self._until_s = time.monotonic() + plan.budget_s
        self._failures: dict[str, str] = {}

    def predict(self) -> None:
        """Predict the cells that are not. Raises PdserveError: nodes cannot be started."""
        calibrations = {formats: self._calibration(formats) for formats in FORMATS}
        missing = [cell for cell in CELLS if self.results.cell(cell) is None]
        if not missing:
            return
        scenario = self._config.scenario
        promise = baseline_promise(calibrations[FORMATS[0]], scenario, self._plan)
        asked = [(cell, self._guessed(cell), calibrations[cell.formats]) for cell in missing]
        say(f"predicting {len(missing)} cells; TTFT {promise.ttft_s:.3g} s, TPOT "
            f"{1e3 * promise.tpot_s:.3g} ms")  # fmt: skip
        work = partial(_predicted, scenario=scenario, plan=self._plan, promise=promise)
        for cell, found, told in in_parallel(work, asked):
            revision = str(self._setup.get("revision", ""))
            result = CellResult(
                cell=cell, revision=revision, promise=promise, guessed=found, predicted=told
            )
            self.results.keep(result)
            say(f"predicted: {cell.name}")

    def measure(self) -> None:
        """Measure the cells that are not; those that fail are left to another run."""
        ids = text_ids(self._config.model) if self._config.model else []
        cells = [one for one in self.results.cells() if self._is_measured(one.cell)]
        asked = [
            (result, number, split)
            for result in cells
            for number, split in enumerate(splits_of(result.predicted))
            if split not in {one.split for one in result.measured}
        ]
        for place, (result, number, split) in enumerate(asked):
            left_s = (self._until_s - time.monotonic()) / (len(asked) - place)
            self._measure(result.cell, split, number, ids, min(self._plan.measure_s, left_s))

    def report(self) -> CrossoverReport:
        """All that is known."""
        config = self._config
        made = [self.results.calibration(formats) for formats in FORMATS]
        return CrossoverReport(
            model=config.model or f"random weights of shape {config.shape}",
            scenario=config.scenario,
            length_scale=self._plan.length_scale,
            random_right=fmean(one.drafts.right for one in made if one is not None),
            cells=self.results.cells(),
            failures=self._failures,
        )

    def _is_measured(self, cell: Cell) -> bool:
        """Nobody guesses what random weights say, so there is nothing to measure of drafts."""
        return bool(self._config.model) or not cell.drafts

    def _calibration(self, formats: Formats) -> Calibration:
        known = self.results.calibration(formats)
        if known is not None:
            return known
        say(f"calibrating {formats.name}")
        asked = CalibrateConfig(
            model=self._config.model,
            shape=self._config.shape,
            budget_s=self._plan.calibrate_s,
            engine=formats.engine(self._config.engine),
        )
        made = calibrating.measured(asked)
        self.results.keep_calibration(formats, made)
        return made

    def _guessed(self, cell: Cell) -> Guessed | None:
        if not cell.drafts:
            return None
        config, plan = self._config, self._plan
        # The demo model takes a quarter of a scenario's lengths, as --quick has them.
        model, scale = (config.model, plan.length_scale) if config.model else _DEMO
        found = guessed(model, cell, config.engine, config.scenario, scale, plan.texts)
        say(f"{cell.name}: {found.tokens_per_step:.2f} tokens a step behind text")
        return found

    def _measure(
        self, cell: Cell, split: tuple[int, int], number: int, ids: Sequence[int], budget_s: float
    ) -> None:
        """Measure a cell at a ratio, and add that to its result."""
        result = self.results.cell(cell)
        assert result is not None
        say(f"measuring {cell.name}, {split[0]}P{split[1]}D")
        try:
            found = measured(
                self._config, cell, result.promise, split,
                modes_of(*split, is_first=number == 0), ids,
                self.results.raw(cell, split), max(0.0, budget_s),
                {**self._setup, "load_average": os.getloadavg()[0]},
            )  # fmt: skip
        except PdserveError as error:
            self._failures[cell.name] = error.message
            say(f"{cell.name}: {error.message}")
            return
        self.results.keep(msgspec.structs.replace(result, measured=[*result.measured, found]))


def _predicted(
    asked: tuple[Cell, Guessed | None, Calibration],
    scenario: ScenarioName, plan: CrossoverPlan, promise: Promise,
) -> tuple[Cell, Guessed | None, Predicted]:  # fmt: skip
    cell, found, calibration = asked
    share = found.share if found else 0.0
    return cell, found, predicted(calibration, share, scenario, plan, promise)


def _show(
    report: CrossoverReport, results: Results, setup: dict[str, object], *, as_json: bool
) -> None:
    results.keep_report(report, markdown(report))
    # With matplotlib, which is not loaded before it is needed.
    from pdserve.commands.simulation.crossover.plot import save_plot

    plot = save_plot(report, results.folder)
    if as_json:
        print_json(report, setup)
        results.archive()
    else:
        told = [f"plot: {plot}", f"everything: {results.archive()}", machine_and_date(setup)]
        print_tables([table(report)], [*remarks(report), *told])
