"""Latency over throughput, and the knee: where the next stream or request would be late."""

from __future__ import annotations

from math import inf
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdserve.commands.simulation.plan.devices.search import Choice
from pdserve.commands.simulation.plan.devices.sizing import Load, Pool, Sized

_DPI = 120
_BEYOND = 1.3  # of the knee: so far the curves are drawn
_POINTS = 60


def save_plot(choice: Choice, load: Load, file: Path) -> None:
    """Save a PNG: TPOT over a node's tokens a second, and TTFT over the cluster's requests."""
    figure = Figure(figsize=(11, 4.5), dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _tpot(left, choice.pools[-1][0], load)
    _ttft(right, *choice.pools[0], load)
    figure.suptitle(f"{choice.architecture}: {choice.text}", fontsize=10)
    FigureCanvasAgg(figure)  # renders without a display
    figure.savefig(file)


def tpot_curve(sized: Sized, load: Load) -> tuple[list[float], list[float], int]:
    """Return (tokens/s of a node, TPOT in ms) for more and more streams, and which point is the
    knee."""
    most, _ = sized.most_streams(load)
    end = min(round(_BEYOND * most) + 1, sized.calibration.limits.max_batch_size)
    counts = sorted({1 + round(i * (end - 1) / _POINTS) for i in range(_POINTS + 1)} | {most})
    times = [sized.step_s(load, count, 0.0) for count in counts]
    rates = [count / seconds for count, seconds in zip(counts, times, strict=True)]
    return rates, [seconds * 1e3 for seconds in times], counts.index(most)


def _tpot(axes: Axes, sized: Sized, load: Load) -> None:
    rates, times, knee = tpot_curve(sized, load)
    axes.plot(rates, times)
    most, limit = sized.most_streams(load)
    axes.plot(rates[knee], times[knee], "o", label=f"knee: {most} streams ({limit})")
    axes.axhline(load.promise.tpot_s * 1e3, color="grey", linewidth=1)
    axes.set(xlabel=f"tokens/s of a node ({sized.node.text})", ylabel="TPOT (ms)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _ttft(axes: Axes, sized: Sized, pool: Pool, load: Load) -> None:
    rates, times = [], []
    for i in range(1, _POINTS + 1):
        at = load.at(_BEYOND * load.rate * i / _POINTS)
        if pool.what == "both":
            ttft_s = sized.shared_ttft_s(at, pool.count)
        else:
            ttft_s = sized.prompt_ttft_s(at, pool.count)
        if ttft_s < inf:
            rates.append(at.rate)
            times.append(ttft_s * 1e3)
    axes.plot(rates, times)
    axes.axvline(load.rate, color="grey", linestyle="--", linewidth=1)
    axes.axhline(load.promise.ttft_s * 1e3, color="grey", linewidth=1)
    axes.set(xlabel="requests/s of all nodes", ylabel=f"TTFT of {load.target:.0%} (ms)")
    axes.set_ylim(bottom=0)
