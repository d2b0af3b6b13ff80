"""`pdserve bench serve`: load for servers, ours or others, and what they do.

Servers run already, or are started and ended in turns, so that each has the machine to itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from rich.table import Table

from pdserve.commands.bench.checkpoints.named import checkpoint_of, gguf_of
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.bench.serve.backend_process import Started, running
from pdserve.commands.bench.serve.config import Load, ServeBenchConfig, ServePlan
from pdserve.commands.bench.serve.in_turns import serve_in_turns
from pdserve.commands.bench.serve.report import ServeRatio, ServeReport, ServeRow
from pdserve.commands.bench.serve.rounds import open_targets, serve
from pdserve.commands.cluster.coordinator_http import key_headers
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK

_LATE_MS = 5.0  # of the client's clock (p99), above which its figures are its own
_SHARE = 0.5  # of a core, likewise


Measure = Callable[[ServeBenchConfig, ServeReport], Coroutine[Any, Any, None]]


def run(config: ServeBenchConfig, setup: dict[str, object]) -> int:
    """Measure a server, and tell; see `run_with`."""
    return run_with(config, setup, _measure)


def run_with(config: ServeBenchConfig, setup: dict[str, object], measure: Measure) -> int:
    """Measure and print; the exit code is 1 if a request failed.

    Ctrl-C ends it early, and so does a server that cannot be used: what was measured is printed.

    Raises:
        ConfigError: the settings contradict each other.
        ClusterError: a server cannot be used, and nothing was measured before.
    """
    report, exit_code = ServeReport([], []), OK
    try:
        asyncio.run(measure(config, report))
    except KeyboardInterrupt:
        if not report.rows:
            raise
        say("interrupted: the loads that were done until then")
        exit_code = FORCED
    except ClusterError as error:
        if not report.rows:
            raise
        say(f"{error}; these are the loads that were done until then")
        exit_code = FAILED
    if config.json:
        print_json(report, setup)
    else:
        tables = [_table(report.rows, config, machine_and_date(setup))]
        if report.ratios:
            tables.append(_ratio_table(report))
        print_tables(tables, _remarks(report))
    return exit_code or (FAILED if any(row.failed for row in report.rows) else OK)


async def _measure(config: ServeBenchConfig, report: ServeReport) -> None:
    plan = config.plan
    if config.against:
        await _in_turns(config, plan, report)
        return
    async with open_targets(config.urls, config.model, plan, key_headers()) as targets:
        await serve(targets, plan, report, say)


async def _in_turns(config: ServeBenchConfig, plan: ServePlan, report: ServeReport) -> None:
    """Measure backends one after the other."""
    backends = config.backends
    places = _places(config, set[str]().union(*(one.places for one in backends)))

    def start(backend: Backend) -> AbstractAsyncContextManager[Started]:
        return running(backend, places, config.start_s, say)

    await serve_in_turns(backends, plan, start, report, say, key_headers())


def _places(config: ServeBenchConfig, needed: set[str]) -> dict[str, str]:
    """Values of the names in commands, if needed: checkpoints are large."""
    places = {"threads": str(config.threads or len(os.sched_getaffinity(0)))}
    if needed & {"model", "gguf"}:
        places["model"] = checkpoint_of(config.shape)
    if "gguf" in needed:
        places["gguf"] = gguf_of(places["model"])
    return places


def _table(rows: list[ServeRow], config: ServeBenchConfig, caption: str) -> Table:
    table = Table(
        title=f"prompts of {config.prompt_tokens} tokens, answers of {config.output_tokens}; ms "
        "are p50/p90/p99",
        caption=caption,
    )
    table.add_column("server")
    columns = ("load", "tokens/s", "requests/s", "TTFT ms", "TPOT ms", "ITL ms", "E2E ms")
    for column in (*columns, "sent", "refused", "failed", "tokens a piece"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.server,
            _load(row),
            f"{row.output_tokens_per_s:.1f}",
            f"{row.requests_per_s:.2f}",
            row.ttft_ms.text(0),
            row.tpot_ms.text(1),
            row.itl_ms.text(1),
            row.e2e_ms.text(0),
            str(row.sent),
            str(row.refused),
            str(row.failed),
            f"{row.tokens_per_piece:.2f}",
        )
    return table


def _ratio_table(report: ServeReport) -> Table:
    table = Table(title=f"against {report.rows[0].server}, median of neighbouring rounds")
    table.add_column("server")
    for column in ("load", "tokens/s", "TTFT p50", "TPOT p50"):
        table.add_column(column, justify="right")
    for row in report.ratios:
        figures = (row.output_tokens_per_s, row.ttft_p50, row.tpot_p50)
        table.add_row(row.server, _load(row), *("-" if f is None else f"{f:.3f}" for f in figures))
    return table


def _remarks(report: ServeReport) -> list[str]:
    """What would be easy to overlook."""
    said = []
    for row in report.rows:
        where = f"{row.server}, {_load(row)}"
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
