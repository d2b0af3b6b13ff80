"""What is measured of a cell: real clusters of all modes, by `bench compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdserve.commands.bench.checkpoints.named import checkpoint_of
from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.compare.goodput import Goodput
from pdserve.commands.bench.compare.recompute import REPORT
from pdserve.commands.bench.compare.report import CompareReport, ModeReport
from pdserve.commands.bench.compare.run import measure
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.crossover.bands import curve_of
from pdserve.commands.simulation.crossover.cells import Cell
from pdserve.commands.simulation.crossover.config import MODES, CrossoverConfig
from pdserve.commands.simulation.crossover.predict import TARGET, Predicted, Sized, Tried
from pdserve.commands.simulation.crossover.texts import case_of
from pdserve.commands.simulation.predict.deployment import Deployment
from pdserve.settings.config import ONE_POOL, Mode
from pdserve.shared.errors import ClusterError


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One cell, or one ratio of its pools."""

    split: tuple[int, int]  # prefill and decode nodes
    here: Sized
    verdicts: list[str]
    answers: str  # whether all modes gave the same ones
    num_different: int  # answers that differ, and must not
    failures: dict[str, str]  # mode |-> why it is missing
    load_average: float  # before it began

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing, and all answers are the same."""
        return not self.failures and not self.num_different


def splits_of(found: Predicted) -> list[tuple[int, int]]:
    """Return the ratios to measure: the best predicted one of this machine's nodes, then others.

    The other ones are those beside it.
    """
    split = found.here.of("disaggregated")
    best = split[0].deployment.prefill
    numbers = sorted({one.deployment.prefill for one in split}, key=lambda n: (abs(n - best), n))
    return [(prefill, found.here.nodes - prefill) for prefill in numbers if abs(prefill - best) < 2]


def modes_of(prefill: int, decode: int, *, is_first: bool) -> list[Mode]:
    """Return the modes to measure at a ratio; co-located nodes have none, so only at the first."""
    modes = [mode for mode in MODES if mode not in ONE_POOL]
    modes += ["colocated"] if is_first else []
    return [*modes, "multiplexed"] if prefill == decode else modes


def measured(
    config: CrossoverConfig, cell: Cell, promise: Promise, split: tuple[int, int],
    modes: Sequence[Mode], ids: Sequence[int], folder: Path, budget_s: float,
    setup: dict[str, object],
) -> Measured:  # fmt: skip
    """Measure modes at a ratio, for so long; `folder` gets what `bench compare --out` writes.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        PdserveError: nothing could be measured.
    """
    prefill, decode = split
    asked = CompareConfig(
        scenarios=[config.scenario],
        modes=list(modes),
        prefill=prefill,
        decode=decode,
        model=config.model or checkpoint_of(config.shape),
        ttft_s=promise.ttft_s,
        tpot_s=promise.tpot_s,
        target=TARGET,
        one_node=False,
        length_scale=config.plan.length_scale,
        quick=True,
        engine=cell.formats.engine(config.engine),
        speculation=cell.speculation,
    )
    plan = dataclasses.replace(asked.plan, budget_s=budget_s)
    report = CompareReport([], [], {}, {**setup, "model": asked.model})

    def make_cases(longest: int) -> list[CompareCase]:
        return [case_of(config.scenario, longest, asked.length_scale, ids)]

    measure(asked, plan, make_cases, folder, report)
    (folder / REPORT).write_bytes(msgspec.json.encode(report) + b"\n")
    return _of(report, split)


def _of(report: CompareReport, split: tuple[int, int]) -> Measured:
    if not report.modes:
        raise ClusterError(f"nothing was measured: {report.failures}")
    (scenario,) = report.scenarios
    load_average = report.setup.get("load_average")
    return Measured(
        split=split,
        here=Sized(sum(split), [_tried(mode, split) for mode in report.modes]),
        verdicts=[verdict.text for verdict in scenario.verdicts],
        answers=scenario.answers.text,
        num_different=scenario.answers.num_different,
        failures=report.failures,
        load_average=load_average if isinstance(load_average, float) else 0.0,
    )


def _tried(mode: ModeReport, split: tuple[int, int]) -> Tried:
    prefill, decode = (0, sum(split)) if mode.mode == "colocated" else split
    deployment = Deployment(msgspec.convert(mode.mode, Mode), prefill, decode)
    goodput = Goodput(mode.goodput, mode.goodput_is, *mode.goodput_interval)
    return Tried(deployment, goodput, curve_of(row.point for row in mode.rows))
