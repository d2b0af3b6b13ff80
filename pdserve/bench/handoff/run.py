"""`pdserve bench handoff`: starts a cluster, and measures what handing a request off costs."""

from __future__ import annotations

import asyncio

from rich.table import Table

from pdserve.bench.config import HandoffBenchConfig
from pdserve.bench.handoff.measurement import HandoffLoad, HandoffReport, measure_handoff
from pdserve.bench.output import print_json, print_tables
from pdserve.cluster.config import ClusterConfig
from pdserve.cluster.supervisor import Cluster
from pdserve.exit_codes import OK

_PERCENTILES = (
    "means are exact; percentiles are linear within buckets of a histogram, 20 % wide, the "
    "smallest of which ends at 0.1 ms"
)


def run(config: HandoffBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the cluster failed, or the settings contradict each other.
    """
    load = HandoffLoad(config.concurrency, config.rounds, config.prompt_range, config.output_tokens)
    report = asyncio.run(_measure(config, load))
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_table(report)], [_PERCENTILES])
    return OK


async def _measure(config: HandoffBenchConfig, load: HandoffLoad) -> HandoffReport:
    cluster = ClusterConfig(
        port=0, transports=config.transports, checkpoint=config.checkpoint, engine=config.engine
    )
    async with Cluster(cluster) as running:
        model = (await running.status()).model
        address = running.url.removeprefix("http://")
        return await measure_handoff(running.url, model, address, load, config.deadline_s)


def _table(report: HandoffReport) -> Table:
    shortest, longest = report.prompt_tokens
    table = Table(
        title=f"end of prefill to first decode step: {report.requests} requests, "
        f"{report.concurrency} at a time, prompts of {shortest} to {longest} tokens (ms)"
    )
    table.add_column("part")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for row in report.rows:
        figures = (row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms)
        table.add_row(row.part, *(f"{figure:.2f}" for figure in figures))
    return table
