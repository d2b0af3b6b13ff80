"""The matrix as a plot: goodputs of the modes, and the best ratio of pools, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdserve.commands.bench.compare.shown.plot import COLOURS
from pdserve.commands.simulation.crossover.config import MODES
from pdserve.commands.simulation.crossover.predict import Sized
from pdserve.commands.simulation.crossover.results import CellResult, CrossoverReport
from pdserve.commands.simulation.crossover.table import as_good
from pdserve.settings.config import Mode

_DPI: Final = 120
_APART: Final = 0.14  # of two modes of a cell


def save_plot(report: CrossoverReport, folder: Path) -> Path:
    """Save a PNG; return it."""
    figure = Figure(figsize=(14, 9), dpi=_DPI, layout="constrained")
    top, bottom = figure.subplots(2, 1)
    _goodputs(top, report)
    _ratios(bottom, report)
    figure.suptitle(f"{report.model}: {report.scenario}", fontsize=11)
    FigureCanvasAgg(figure)  # renders without a display
    file = folder / "crossover.png"
    figure.savefig(file)
    return file


def _goodputs(axes: Axes, report: CrossoverReport) -> None:
    for number, mode in enumerate(MODES):
        shift = _APART * (number - (len(MODES) - 1) / 2)
        for place, result in enumerate(report.cells):
            x = place + shift
            if (rate := _rate(result.predicted.here, mode)) is not None:
                axes.plot(x, rate, "o", mfc="none", color=COLOURS[mode])
            for measured in result.measured:
                for one in measured.here.of(mode):
                    low, high = one.goodput.low, one.goodput.high
                    if high is not None:
                        axes.plot([x, x], [low, high], "-", color=COLOURS[mode])
                    axes.plot(x, one.goodput.rate, "o", color=COLOURS[mode])
        axes.plot([], [], "o", color=COLOURS[mode], label=mode)
    axes.set_ylabel("goodput (requests/s) of this machine")
    axes.set_title("hollow: predicted; full: measured, 5 to 95 %", fontsize=10)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, ncols=len(MODES), loc="upper left")
    _label(axes, report.cells)


def _ratios(axes: Axes, report: CrossoverReport) -> None:
    sizes = [sized.nodes for sized in report.cells[0].predicted.sizes] if report.cells else []
    for number, nodes in enumerate(sizes):
        shift = _APART * (number - (len(sizes) - 1) / 2)
        xs, best = [], []
        for place, result in enumerate(report.cells):
            sized = next(one for one in result.predicted.sizes if one.nodes == nodes)
            split = as_good(sized.of("disaggregated"))
            shares = [one.deployment.prefill / nodes for one in split]
            axes.plot([place + shift] * 2, [min(shares), max(shares)], "-", color=f"C{number}")
            xs.append(place + shift)
            best.append(shares[0])
        axes.plot(xs, best, "o", color=f"C{number}", label=f"{nodes} nodes")
    axes.set_ylabel("share of prefill nodes")
    axes.set_ylim(0, 1)
    axes.set_title("best ratio predicted for mode disaggregated; lines: as good", fontsize=10)
    if sizes:
        axes.legend(fontsize=8, ncols=len(sizes))
    _label(axes, report.cells)


def _rate(sized: Sized, mode: Mode) -> float | None:
    of_mode = sized.of(mode)
    return of_mode[0].goodput.rate if of_mode else None


def _label(axes: Axes, cells: list[CellResult]) -> None:
    names = [cell.cell.name.replace("-", "\n", 1) for cell in cells]
    axes.set_xticks(range(len(cells)), names, fontsize=7)
    axes.set_xlim(-0.5, len(cells) - 0.5)  # the same of both plots
    axes.grid(alpha=0.25)
