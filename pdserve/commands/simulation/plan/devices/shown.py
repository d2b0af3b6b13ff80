"""The answer of `pdserve plan --devices` for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.table import Table

from pdserve.commands.simulation.plan.devices.answer import DevicesReport
from pdserve.commands.simulation.plan.devices.roofline import FIT
from pdserve.commands.simulation.plan.devices.rounding import UNIT

_COLUMNS: Final = (
    *("architecture", "nodes", "price/h", "off by"),
    *("what limits it", "simulated", "in time"),
)


def tables(report: DevicesReport) -> Iterator[RenderableType]:
    """What is asked, what would serve it, what was chosen and why, and how to start it."""
    promise = report.promise
    yield (
        f"{report.model}: {report.rate:.4g} requests/s of {report.prompt} tokens in and "
        f"{report.output} out; TTFT {promise.ttft_s * 1e3:.0f} ms, TPOT "
        f"{promise.tpot_s * 1e3:.3g} ms, to {report.target:.0%}"
    )
    table = Table(title="the cheapest of each architecture")
    for column in _COLUMNS:
        table.add_column(column)
    for row in report.rows:
        table.add_row(
            row.architecture + (" *" if row.is_chosen else ""),
            row.nodes,
            f"{row.price:.4g}",
            f"{row.off_by:.3g}" if row.off_by else "",
            "; ".join(row.limits),
            row.simulated.slice,
            f"{row.simulated.attainment:.0%}",
        )
    for name, why in report.lacking.items():
        table.add_row(name, "none", "", "", why, "", "")
    yield table
    if any(row.off_by for row in report.rows):
        yield f"off by, in fewer bits than stored: {UNIT}; see docs/FAILURES.md"
    yield f"choice: {report.chosen or 'none'}: {report.why}"
    for row in report.rows:
        if row.is_chosen:
            yield "\n".join([*row.commands, f"MODEL: {report.model}"])
    if report.plot:
        yield f"latency over throughput: {report.plot}"
    yield (
        f"step times are from data sheets, {FIT}; prices are assumed where --price has none\n"
        f"took {report.seconds:.0f} s"
    )
