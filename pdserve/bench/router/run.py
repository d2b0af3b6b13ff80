"""`pdserve bench router`: what a placement decision costs among very many nodes."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from pdserve.bench.config import RouterBenchConfig
from pdserve.bench.output import print_json, print_tables
from pdserve.bench.router.measurement import RouterBench, measure_router
from pdserve.exit_codes import OK


def run(config: RouterBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code."""
    report = measure_router(
        config.nodes, config.nodes_per_host, config.blocks, config.prompt_tokens, config.decisions
    )
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_render(report)])
    return OK


def _render(report: RouterBench) -> Group:
    table = Table(
        title=f"a decision among {report.nodes} nodes, {report.nodes_per_host} a host, "
        f"{report.blocks} cached blocks (microseconds)"
    )
    for column in ("router", "mode"):
        table.add_column(column)
    for column in ("prompt", "cached", "p50", "p99"):
        table.add_column(column, justify="right")
    for row in report.decisions:
        table.add_row(
            row.policy,
            row.mode,
            str(row.prompt_tokens),
            f"{row.hit_share:.0%}",
            f"{row.p50_us:.0f}",
            f"{row.p99_us:.0f}",
        )
    hashing = ", ".join(f"{row.prompt_tokens}: {row.p50_us:.0f}" for row in report.hashing)
    return Group(
        table,
        f"hashing a prompt, once a request (tokens: microseconds): {hashing}",
        f"index: {report.events_per_s:,.0f} blocks/s, {report.index_bytes / 2**20:.0f} MiB",
        f"books: {report.bookings_us:.0f} microseconds for a request of 65 tokens",
    )
