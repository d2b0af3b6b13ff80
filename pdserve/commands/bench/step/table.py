"""Prints the report of `pdserve bench step` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from pdserve.commands.bench.step.measurement import StepBenchReport, StepBenchRow

_COLUMNS = (
    "batch",
    "context",
    "p50 ms",
    "min ms",
    "floor ms",
    "ratio",
    "beside",
    "overhead ms",
    "tokens/s",
    "steps",
)


def step_table(report: StepBenchReport) -> Table:
    """One row per kind of step."""
    first = report.rows[0]
    table = Table(
        title=f"{first.model}, {first.weights}: steps, and what they cannot be faster than"
    )
    table.add_column("phase")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("limit")
    for row in report.rows:
        table.add_row(
            row.phase,
            str(row.batch),
            str(row.context),
            f"{row.p50_ms:.2f}",
            f"{row.min_ms:.2f}",
            f"{row.floor_ms:.2f}",
            f"{row.floor_ratio:.2f}",
            f"{row.beside_ratio:.2f}",
            f"{row.overhead_ms:.2f}",
            f"{row.tokens_per_s:.0f}",
            str(row.steps),
            row.limit,
        )
    return table


def neighbour_table(rows: Sequence[StepBenchRow]) -> Table:
    """One row per kind of step that was measured beside neighbours."""
    table = Table(title="beside busy neighbours, against what the cores that they used explain")
    table.add_column("phase")
    for column in ("batch", "context", "alone ms", "beside ms", "lost cores", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        if row.neighbours is not None:
            table.add_row(
                row.phase,
                str(row.batch),
                str(row.context),
                f"{row.neighbours.alone_ms:.2f}",
                f"{row.neighbours.beside_ms:.2f}",
                f"{row.neighbours.lost_cores:.2f}",
                f"{row.neighbours.ratio:.2f}",
            )
    return table


def step_remarks(report: StepBenchReport) -> list[str]:
    """The conditions of the measurement, and what was not measured."""
    machine = report.machine
    on_gpu = f"{machine.processor}, {machine.kernels}"
    on_cpu = f"{machine.threads} threads of {machine.processor}, kernels {machine.kernels}"
    said = [
        f"{on_cpu if machine.threads else on_gpu}, load average {machine.load_average:.1f} before "
        "it began",
        f"best seen: {machine.read_gb_per_s:.1f} GB/s ({machine.read_seen_in}), "
        f"{machine.product_gflop_per_s:.0f} GFLOP/s ({machine.product_seen_in}); the yardsticks' "
        f"medians: {machine.yardstick_read_gb_per_s:.1f} GB/s, "
        f"{machine.yardstick_product_gflop_per_s:.0f} GFLOP/s",
        "ratio: p50 / floor with the best rates; beside: with the yardsticks of the same moment; "
        "overhead: batch and sampling, without the event loop (pdserve bench overhead has that)",
    ]
    said += [
        f"not measured: {case.phase} {case.batch} x {case.context}: {case.reason}"
        for case in report.skipped
    ]
    return said
