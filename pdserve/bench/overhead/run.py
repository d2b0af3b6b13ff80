"""`pdserve bench overhead`: starts a cluster, and measures what a decode step costs under load."""

from __future__ import annotations

import asyncio

from rich.table import Table

from pdserve.bench.config import OverheadConfig
from pdserve.bench.output import print_json, print_tables
from pdserve.bench.overhead.measurement import (
    OverheadReport,
    OverheadRow,
    WatchedNode,
    measure_overhead,
)
from pdserve.cluster.config import ClusterConfig
from pdserve.cluster.supervisor import Cluster
from pdserve.exit_codes import OK


def run(config: OverheadConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the cluster failed, or the settings leave nothing to measure.
    """
    rows = asyncio.run(_measure(config))
    if config.json:
        print_json(OverheadReport(rows), setup)
    else:
        print_tables([_table(rows)])
    return OK


async def _measure(config: OverheadConfig) -> list[OverheadRow]:
    cluster = ClusterConfig(port=0, checkpoint=config.checkpoint, engine=config.engine)
    async with Cluster(cluster) as running:
        model = (await running.status()).model
        address = (await running.metrics_addresses())["decode-0"]
        node = WatchedNode(address, running.pid("decode-0"))
        return [
            await measure_overhead(
                running.url, model, node, batch, config.tokens, config.deadline_s
            )
            for batch in config.batches
        ]


def _table(rows: list[OverheadRow]) -> Table:
    table = Table(title="decode step: the model, and everything else (ms)")
    times = ("model", "else", "else p50", "else p90", "starved")
    for column in ("batch", "steps", *times, "tokens/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            str(row.steps),
            f"{row.model_ms:.2f}",
            f"{row.overhead_ms:.2f}",
            f"{row.overhead_p50_ms:.2f}",
            f"{row.overhead_p90_ms:.2f}",
            f"{row.starved_ms:.2f}",
            f"{row.tokens_per_s:.0f}",
        )
    return table
