"""The answer of `pdserve simulate` as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from pdserve.commands.bench.compare.shown.table import SHARES, share_cells
from pdserve.commands.simulation.predict.deployment import Result
from pdserve.commands.simulation.simulate.report import ModeAnswer, SimulateReport


def tables(report: SimulateReport) -> Iterator[RenderableType]:
    """The runs, the goodput of each mode, and what to think of them."""
    yield _runs(report)
    if any(mode.goodput for mode in report.modes):
        yield _goodput(report)
    for mode in report.modes:
        if mode.outside:
            yield (
                f"{mode.deployment.text}: from {mode.outside[0]:.3g} requests/s on, {mode.why}; "
                "--extrapolate predicts these rates as well"
            )
    yield report.card.text
    yield (
        f"answers differ by {report.off_tokens('kind'):.3g} tokens from what is usual for their "
        f"kind, and by {report.off_tokens('mean'):.3g} from the mean of all"
    )
    yield f"simulated {report.speed:.0f} s per second of one core"


def _runs(report: SimulateReport) -> Table:
    promise = report.promise
    table = Table(
        title=f"{report.load}\npromised: TTFT {promise.ttft_s * 1e3:.0f} ms, TPOT "
        f"{promise.tpot_s * 1e3:.1f} ms, to {report.target:.0%} of each kind"
    )
    table.add_column("deployment")
    for column in (
        "rate/s", *SHARES,
        "TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "ITL ms p50/p90/p99", "busiest node",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for mode in report.modes:
        for row in mode.rows:
            table.add_row(mode.deployment.text, *_cells(row))
        table.add_section()
    return table


def _cells(row: Result) -> list[str]:
    score = row.score
    in_time, *others = share_cells(score)
    return [
        f"{row.rate:.3g}",
        f"{in_time} stopped" if row.stopped_early else in_time,
        *others,
        score.ttft_ms.text(0),
        score.tpot_ms.text(1),
        score.itl_ms.text(1),
        f"{max(row.busy.values()):.0%}",
    ]


def _goodput(report: SimulateReport) -> Table:
    table = Table(title=f"goodput ({report.target:.0%} in time)")
    table.add_column("deployment")
    for column in ("goodput/s", "5-95 %", "of the best", "per node"):
        table.add_column(column, justify="right")
    found = [mode for mode in report.modes if mode.goodput is not None]
    best = max(_rate(mode) for mode in found)
    for mode in found:
        assert mode.goodput is not None
        low, high = mode.goodput.low, mode.goodput.high
        table.add_row(
            mode.deployment.text,
            mode.goodput.text,
            f"> {low:.3g}" if high is None else f"{low:.3g}-{high:.3g}",
            f"{_rate(mode) / best:.0%}" if best else "-",
            f"{mode.goodput.rate / mode.deployment.num_nodes:.3g}",
        )
    return table


def _rate(mode: ModeAnswer) -> float:
    return mode.goodput.rate if mode.goodput else 0.0
