"""`pdserve bench serve`: load for servers that run already, ours or others, and what they do."""

from __future__ import annotations

import asyncio

from rich.table import Table

from pdserve.bench.serve.plan import Load
from pdserve.bench.serve.report import ServeRatio, ServeReport, ServeRow
from pdserve.bench.serve.rounds import open_targets, serve
from pdserve.bench.slo_score import Percentiles
from pdserve.cli.bench.output import print_json, print_tables, say
from pdserve.cli.bench.speed_config import ServeBenchConfig
from pdserve.cli.credentials import key_headers
from pdserve.cli.exit_codes import FAILED, OK

_LATE_MS = 5.0  # of the client's clock (p99), above which its figures are its own
_SHARE = 0.5  # of a core, likewise


def run(config: ServeBenchConfig) -> int:
    """Measure and print; the exit code is 1 if a request failed.

    Raises:
        ConfigError: the settings contradict each other.
        ClusterError: a server cannot be used.
    """
    report = asyncio.run(_measure(config))
    if config.json:
        print_json(report)
    else:
        tables = [_table(report.rows, config)]
        if report.ratios:
            tables.append(_ratio_table(report))
        print_tables(tables, _remarks(report))
    return FAILED if any(row.failed for row in report.rows) else OK


async def _measure(config: ServeBenchConfig) -> ServeReport:
    plan = config.plan
    async with open_targets(config.url, config.model, plan, key_headers()) as targets:
        return await serve(targets, plan, say)


def _table(rows: list[ServeRow], config: ServeBenchConfig) -> Table:
    table = Table(
        title=f"prompts of {config.prompt_tokens} tokens, answers of {config.output_tokens}; ms "
        "are p50/p90/p99"
    )
    table.add_column("server")
    columns = ("load", "tokens/s", "requests/s", "TTFT ms", "TPOT ms", "ITL ms", "E2E ms")
    for column in (*columns, "sent", "refused", "failed", "tokens a piece"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.url,
            _load(row),
            f"{row.output_tokens_per_s:.1f}",
            f"{row.requests_per_s:.2f}",
            _three(row.ttft_ms, 0),
            _three(row.tpot_ms, 1),
            _three(row.itl_ms, 1),
            _three(row.e2e_ms, 0),
            str(row.sent),
            str(row.refused),
            str(row.failed),
            f"{row.tokens_per_piece:.2f}",
        )
    return table


def _ratio_table(report: ServeReport) -> Table:
    table = Table(title=f"against {report.rows[0].url}, median of neighbouring rounds")
    table.add_column("server")
    for column in ("load", "tokens/s", "TTFT p50", "TPOT p50"):
        table.add_column(column, justify="right")
    for row in report.ratios:
        figures = (row.output_tokens_per_s, row.ttft_p50, row.tpot_p50)
        table.add_row(row.url, _load(row), *("-" if f is None else f"{f:.3f}" for f in figures))
    return table


def _remarks(report: ServeReport) -> list[str]:
    """What would be easy to overlook."""
    said = []
    for row in report.rows:
        where = f"{row.url}, {_load(row)}"
        if row.prompt_tokens:
            said.append(f"{where}: prompts of {row.prompt_tokens:.0f} tokens as it counts them")
        late_ms = row.client_late_ms.p99 or 0.0
        if late_ms > _LATE_MS or row.client_core_share > _SHARE:
            said.append(
                f"{where}: the client was late by {late_ms:.1f} ms (p99) and took "
                f"{row.client_core_share:.0%} of a core: figures are partly its own"
            )
        said += [f"{where}: {count} times: {text}" for text, count in row.errors.items()]
    return said


def _load(row: ServeRow | ServeRatio) -> str:
    return str(Load(row.concurrency, row.rate))


def _three(figures: Percentiles, digits: int) -> str:
    return "/".join(
        "-" if p is None else f"{p:.{digits}f}" for p in (figures.p50, figures.p90, figures.p99)
    )
