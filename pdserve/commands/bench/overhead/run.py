"""`pdserve bench overhead`: what a decode step costs besides the model, in a cluster under load.

That is planning, batch, sampling and messages. Closed-loop streams keep the decode batch at one
size. The node's own histograms are read at the beginning and the end of the time in which all
streams are in the batch, so their difference is steady state only. They are read ever less often,
since composing them takes the node as long as several steps.

If client, coordinator and nodes share few cores, most of the overhead may be waiting for a core.
`starved_ms` shows how long the node's event loop waited, for other processes or for the thread of
its own engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.table import Table

from pdserve.commands.bench.cpu_time import starved_seconds
from pdserve.commands.bench.load.client import Client, group_within, open_session
from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.bench.overhead.config import OverheadConfig
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.scrape import Samples, between, scrape
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import OK

PROMPT_TOKENS = 16
FIRST_PAUSE_S = 0.05  # first pause between two readings; each pause is twice the one before


class OverheadRow(msgspec.Struct, frozen=True):
    """One batch size. Times in milliseconds."""

    batch: int
    steps: int
    model_ms: float
    overhead_ms: float
    overhead_p50_ms: float
    overhead_p90_ms: float
    starved_ms: float  # per step: how long the node's event loop waited for a core
    tokens_per_s: float


class OverheadReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench overhead`."""

    rows: list[OverheadRow]


@dataclass(frozen=True, slots=True)
class WatchedNode:
    """The measured decode node."""

    metrics_address: str
    pid: int


@dataclass(frozen=True, slots=True)
class _Look:
    """The node's metrics at one time."""

    samples: Samples
    starved_s: float
    at_s: float


async def measure_overhead(
    url: str,
    models: Sequence[str],
    node: WatchedNode,
    batch: int,
    num_tokens: int,
    deadline_s: float,
) -> OverheadRow:
    """Run `batch` streams of `num_tokens` tokens each, and read the decode node's histograms.

    Streams name the models in turns.

    Raises:
        ClusterError: a stream broke, the streams were not done within `deadline_s`, or never all
            in the batch together.
    """
    looks: list[_Look] = []
    late = f"{batch} streams were not done within {deadline_s} s"
    async with open_session() as session, group_within(deadline_s, late) as tasks:
        clients = [Client(session, url, model) for model in models]
        streams = [
            tasks.create_task(clients[n % len(clients)].stream(_prompt(n), num_tokens))
            for n in range(batch)
        ]
        pause_s = FIRST_PAUSE_S
        while not any(stream.done() for stream in streams):
            look = await _look(node)
            if look.samples["pdserve_running_requests"] == batch:
                looks.append(look)
                pause_s *= 2
            await asyncio.wait(streams, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
    if len(looks) < 2:
        raise ClusterError(
            f"{batch} streams of {num_tokens} tokens were never in the batch together for long: "
            "use more tokens"
        )
    return _row(batch, looks[0], looks[-1])


async def _look(node: WatchedNode) -> _Look:
    samples = await scrape(node.metrics_address)
    return _Look(samples, starved_seconds(node.pid), time.perf_counter())


def _row(batch: int, first: _Look, last: _Look) -> OverheadRow:
    overhead = between(first.samples, last.samples, "pdserve_step_overhead_seconds")
    tokens = between(first.samples, last.samples, "pdserve_batch_requests").total
    return OverheadRow(
        batch=batch,
        steps=int(overhead.count),
        model_ms=between(first.samples, last.samples, "pdserve_step_seconds").mean * 1e3,
        overhead_ms=overhead.mean * 1e3,
        overhead_p50_ms=overhead.quantile(0.5) * 1e3,
        overhead_p90_ms=overhead.quantile(0.9) * 1e3,
        starved_ms=(last.starved_s - first.starved_s) / max(overhead.count, 1.0) * 1e3,
        tokens_per_s=tokens / (last.at_s - first.at_s),
    )


def _prompt(index: int) -> list[int]:
    """Return a distinct prompt for each stream, so that no prefix is shared."""
    return [20 + (index * 7 + i) % 200 for i in range(PROMPT_TOKENS)]


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
                running.url, [model], node, batch, config.tokens, config.deadline_s
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
