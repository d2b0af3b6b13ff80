"""Plots of a comparison.

The plot of rates is drawn as in DistServe (OSDI'24, figure 8): for each mode a solid line for both
targets, a dotted one for TTFT and a dashed one for TPOT; a grey line at the target attainment, and
a vertical line where a mode's solid line crosses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdserve.commands.bench.compare.goodput import merged
from pdserve.commands.bench.compare.report import CompareReport, ModeReport, RateRow, ScenarioReport
from pdserve.commands.bench.load.slo_score import Score, wilson

COLOURS = {
    "disaggregated": "tab:blue",
    "colocated": "tab:orange",
    "adaptive": "tab:green",
    "flowing": "tab:red",
    "multiplexed": "tab:purple",
}
_OTHER_COLOURS = ("tab:brown", "tab:pink", "tab:olive", "tab:cyan", "black")  # of other servers
_DPI = 120


def save_plots(report: CompareReport, folder: Path) -> list[Path]:
    """Save two PNGs for each scenario: attainment and latencies. `folder` is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for scenario in report.scenarios:
        modes = [mode for mode in report.modes if mode.scenario == scenario.name]
        for name, figure in figures(scenario, modes):
            path = folder / f"{scenario.name}-{name}.png"
            FigureCanvasAgg(figure)  # renders without a display
            figure.savefig(path)
            saved.append(path)
    return saved


def figures(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> list[tuple[str, Figure]]:
    """Return the plots of a scenario by name."""
    return [
        ("attainment", attainment_figure(scenario, modes)),
        ("latency", latency_figure(scenario, modes)),
    ]


def attainment_figure(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Figure:
    """Plot attainment over rate; the band is the 95 % interval of joint attainment.

    Runs at the same rate are one, as for goodput.
    """
    figure = Figure(figsize=(8, 5), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for mode, colour in zip(modes, _colours(modes), strict=True):
        points = merged(row.point for row in mode.rows)
        rates = [point.rate for point in points]

        def curve(value: Callable[[Score], float], mode: ModeReport = mode) -> list[float]:
            return [100 * share for _, share in _by_rate(mode, value)]

        both = [100 * point.attainment for point in points]
        axes.plot(rates, both, "-o", color=colour, label=f"{mode.mode}: {mode.goodput_text}")
        axes.plot(rates, curve(lambda score: score.ttft_attainment), ":", color=colour)
        axes.plot(rates, curve(lambda score: score.tpot_attainment), "--", color=colour)
        bounds = [
            wilson(*min(p.kinds.values(), key=lambda kind: kind[0] / kind[1])) for p in points
        ]
        low, high = ([100 * bound[end] for bound in bounds] for end in (0, 1))
        axes.fill_between(rates, low, high, color=colour, alpha=0.12, linewidth=0)
        if mode.goodput_is == "crossing":
            axes.axvline(mode.goodput, color=colour, linestyle=(0, (6, 4)), linewidth=1)
    axes.axhline(100 * scenario.target, color="grey", linewidth=1)
    axes.set_ylim(0, 110)
    axes.set_ylabel("requests in time (%)")
    _label_rates(axes)
    promise = scenario.promise
    axes.set_title(
        f"{scenario.name}: {scenario.shows}\n"
        f"TTFT {promise.ttft_s * 1e3:.0f} ms, TPOT {promise.tpot_s * 1e3:.1f} ms "
        "(solid: both; dotted: TTFT; dashed: TPOT)",
        fontsize=10,
    )
    if modes:
        axes.legend(loc="lower left", fontsize=9)
    return figure


def latency_figure(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Figure:
    """Plot TTFT p90, TPOT p90 and ITL p99 over rate, with the targets."""
    figure = Figure(figsize=(13, 4), dpi=_DPI, layout="constrained")
    panels: list[tuple[str, Callable[[RateRow], float | None], float | None]] = [
        ("TTFT p90 (ms)", lambda row: row.score.ttft_ms.p90, scenario.promise.ttft_s),
        ("TPOT p90 (ms)", lambda row: row.score.tpot_ms.p90, scenario.promise.tpot_s),
        ("ITL p99 (ms)", lambda row: row.score.itl_ms.p99, None),
    ]
    all_axes = figure.subplots(1, len(panels))
    for axes, (title, value, promised_s) in zip(all_axes, panels, strict=True):
        for mode, colour in zip(modes, _colours(modes), strict=True):
            points = [(row.rate, y) for row in mode.rows if (y := value(row)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "-o", color=colour, label=mode.mode)
        if promised_s is not None:
            axes.axhline(promised_s * 1e3, color="grey", linewidth=1)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        _label_rates(axes)
    if all_axes[0].get_legend_handles_labels()[0]:
        all_axes[0].legend(fontsize=9)
    figure.suptitle(f"{scenario.name}: {scenario.shows}", fontsize=10)
    return figure


def _colours(modes: Sequence[ModeReport]) -> list[str]:
    """Return a colour for each: modes have their own, and other servers take turns."""
    others = cycle(_OTHER_COLOURS)
    return [COLOURS.get(mode.mode) or next(others) for mode in modes]


def _by_rate(mode: ModeReport, value: Callable[[Score], float]) -> Iterator[tuple[float, float]]:
    """Yield (rate, mean) of a share: several runs at one rate are one longer run."""
    for rate, rows in groupby(mode.rows, key=lambda row: row.rate):
        scores = [row.score for row in rows]
        sent = sum(score.sent for score in scores)
        yield rate, sum(value(score) * score.sent for score in scores) / sent


def _label_rates(axes: Axes) -> None:
    axes.set_xlabel("rate (requests/s, all cores)")
    axes.grid(alpha=0.25)
