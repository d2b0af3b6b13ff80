"""`pdserve bench handoff`: how long it takes to hand a request off from one node to the other.

Rounds of concurrent streams are sent to a cluster that is started for it. The coordinator's
histograms, read before and after, show how long each request took from the end of its prefill to
its first decode step, and how this time was spent: in parts of a kind, and hop by hop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
from rich.table import Table

from pdserve.commands.bench.handoff import forms
from pdserve.commands.bench.handoff.config import HandoffBenchConfig
from pdserve.commands.bench.load.client import PLAIN_IDS, Client, group_within, open_client
from pdserve.commands.bench.output import print_json, print_tables, say
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.scrape import HistogramDelta, Samples, between, scrape
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.config import HandoffConfig
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import OK

# Part |-> histogram of the coordinator. For each request, the first three add up to the total less
# the copy; so do their means, but not their percentiles.
PARTS = {
    "waiting for room": "pdserve_request_handoff_room_seconds",
    "waiting for the next step": "pdserve_request_handoff_step_seconds",
    "messages": "pdserve_request_handoff_message_seconds",
    "raw copy": "pdserve_request_handoff_copy_seconds",
    "all less the copy": "pdserve_request_handoff_overhead_seconds",
    "all": "pdserve_request_handoff_seconds",
}
# Hop |-> histogram of the coordinator. They follow one another, so their means add up to the total.
HOPS = {
    "prefill node applies the step": "pdserve_request_handoff_apply_seconds",
    "it writes the record": "pdserve_request_handoff_queue_seconds",
    "decode node reads it": "pdserve_request_handoff_travel_seconds",
    "turn to pull, and room": "pdserve_request_handoff_turn_seconds",
    "pull, with its copy": "pdserve_request_handoff_pull_seconds",
    "adopted": "pdserve_request_handoff_adopt_seconds",
    "next step begins": "pdserve_request_handoff_step_seconds",
    "all": "pdserve_request_handoff_seconds",
}
_PERCENTILES = (
    "means are exact; percentiles are linear within buckets of a histogram, 20 % wide, the "
    "smallest of which ends at 0.1 ms"
)


class HandoffRow(msgspec.Struct, frozen=True):
    """One part of the handoff, over all requests. Milliseconds."""

    part: str
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


class HandoffReport(msgspec.Struct, frozen=True):
    """The results of one run."""

    requests: int  # handed-off requests
    concurrency: int
    prompt_tokens: list[int]  # shortest, longest
    rows: list[HandoffRow]
    hops: list[HandoffRow]  # the time line


class HandoffLoad(msgspec.Struct, frozen=True):
    """The load to send."""

    concurrency: int
    rounds: int
    prompt_tokens: tuple[int, int]  # shortest, longest
    output_tokens: int

    def prompts(self) -> list[list[list[int]]]:
        """Return a warm-up round and then `rounds` more, with one prompt for each stream.

        No two prompts share a prefix worth caching.
        """
        rng = random.Random(0)
        return [
            [
                rng.choices(PLAIN_IDS, k=rng.randint(*self.prompt_tokens))
                for _ in range(self.concurrency)
            ]
            for _ in range(1 + self.rounds)
        ]


async def measure_handoff(
    url: str, model: str, metrics_address: str, load: HandoffLoad, deadline_s: float
) -> HandoffReport:
    """Send the load, after one round that is not counted, and read the histograms.

    Raises:
        ClusterError: a stream broke, a round was not done within `deadline_s`, or nothing was
            handed off.
    """
    warm_up, *rounds = load.prompts()
    async with open_client(url, model) as client:
        await _send(client, warm_up, load.output_tokens, deadline_s)
        before = await scrape(metrics_address)
        for prompts in rounds:
            await _send(client, prompts, load.output_tokens, deadline_s)
        return make_report(before, await scrape(metrics_address), load)


def make_report(before: Samples, after: Samples, load: HandoffLoad) -> HandoffReport:
    """Compute the rows from two readings of the coordinator's metrics.

    Raises:
        ClusterError: nothing was handed off between them.
    """
    count = int(between(before, after, PARTS["all"]).count)
    if count == 0:
        raise ClusterError("no request was handed off: the cluster has no prefill node")
    rows, hops = (
        [_row(part, between(before, after, name)) for part, name in names.items()]
        for names in (PARTS, HOPS)
    )
    return HandoffReport(count, load.concurrency, list(load.prompt_tokens), rows, hops)


def _row(part: str, delta: HistogramDelta) -> HandoffRow:
    return HandoffRow(
        part=part,
        mean_ms=delta.mean * 1e3,
        p50_ms=delta.quantile(0.5) * 1e3,
        p90_ms=delta.quantile(0.9) * 1e3,
        p99_ms=delta.quantile(0.99) * 1e3,
    )


async def _send(
    client: Client, prompts: Sequence[Sequence[int]], num_tokens: int, deadline_s: float
) -> None:
    """Send one round, all streams at once."""
    late = f"{len(prompts)} streams were not done within {deadline_s} s"
    async with group_within(deadline_s, late) as tasks:
        for prompt in prompts:
            tasks.create_task(client.stream(prompt, num_tokens))


def run(config: HandoffBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the cluster failed, or the settings contradict each other.
    """
    if config.wire:
        compared = asyncio.run(forms.measure_forms(config))
        if config.json:
            print_json(compared, setup)
        else:
            print_tables([forms.table_of(compared)], [])
        return OK
    load = HandoffLoad(config.concurrency, config.rounds, config.prompt_range, config.output_tokens)
    report = asyncio.run(_measure(config, load))
    if config.json:
        print_json(report, setup)
    else:
        print_tables(_tables(report), [_PERCENTILES])
    return OK


async def _measure(config: HandoffBenchConfig, load: HandoffLoad) -> HandoffReport:
    cluster = ClusterConfig(
        port=0,
        transports=config.transports,
        checkpoint=config.checkpoint,
        engine=config.engine,
        handoff=HandoffConfig(links=config.links),
    )
    async with Cluster(cluster) as running:
        if running.warning:
            say(running.warning)
        model = (await running.status()).model
        address = running.url.removeprefix("http://")
        return await measure_handoff(running.url, model, address, load, config.deadline_s)


def _tables(report: HandoffReport) -> list[Table]:
    shortest, longest = report.prompt_tokens
    title = (
        f"end of prefill to first decode step: {report.requests} requests, "
        f"{report.concurrency} at a time, prompts of {shortest} to {longest} tokens (ms)"
    )
    return [_table(title, "part", report.rows), _table("hop by hop (ms)", "until", report.hops)]


def _table(title: str, first_column: str, rows: Sequence[HandoffRow]) -> Table:
    table = Table(title=title)
    table.add_column(first_column)
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms)
        table.add_row(row.part, *(f"{figure:.2f}" for figure in figures))
    return table
