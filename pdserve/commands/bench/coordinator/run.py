"""`pdserve bench coordinator`: a real coordinator, all of whose nodes are simulated.

The coordinator has one core to itself, threads of gRPC included, as far as there are several; the
simulated nodes, in one process, and the client share the others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import uvloop
from rich.table import Table

from pdserve.commands.bench.coordinator.chat_stream import chat_target
from pdserve.commands.bench.coordinator.config import CoordinatorBenchConfig
from pdserve.commands.bench.coordinator.load import MeasuredServer
from pdserve.commands.bench.coordinator.measurement import (
    PLAIN,
    TRACED,
    AddedTtft,
    CoordinatorReport,
    CoordinatorRow,
    TracedRow,
    measure_servers,
)
from pdserve.commands.bench.coordinator.otlp_collector import collecting
from pdserve.commands.bench.coordinator.simulated_nodes import NODE_IDS, SIMULATED, NodesPlan
from pdserve.commands.bench.coordinator.sse_server import MODEL
from pdserve.commands.bench.load.outcome import Percentiles
from pdserve.commands.bench.output import print_json, print_tables, say
from pdserve.commands.bench.serve.config import Load
from pdserve.commands.cluster.child import Child, Exit
from pdserve.commands.cluster.coordinator_http import key_headers
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.commands.cluster.readiness import wait_until
from pdserve.commands.cluster.status import fetch_status
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.config import CoordinatorConfig
from pdserve.settings.flags import as_flags
from pdserve.settings.tracing import TracingConfig
from pdserve.shared.process.exit_codes import FAILED, OK

_STOP_S = 5.0
_KEPT = 0.9  # of an open loop's rate


def run(config: CoordinatorBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code is 1 if a request failed.

    Raises:
        PdserveError: a process did not start, or a server does not answer.
    """
    report = uvloop.run(_measure(config))
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_table(report)], _remarks(report))
    return FAILED if any(row.failed for row in report.rows) else OK


async def _measure(config: CoordinatorBenchConfig) -> CoordinatorReport:
    plan = config.plan
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(_servers(config))
        against = config.against
        if against:
            target = chat_target(against, config.against_model, key_headers())
            other = await stack.enter_async_context(target)
            servers.append(MeasuredServer(against, other, config.against_pid))
        direct, *others = servers
        return await measure_servers(others, direct, plan, say)


@asynccontextmanager
async def _servers(config: CoordinatorBenchConfig) -> AsyncIterator[list[MeasuredServer]]:
    """The simulated server to call directly, and what is measured of ours; all ready."""
    given = config.checkpoint
    checkpoint = resolve_checkpoint(
        given.model or str(CHECKPOINT_PATH), given.revision, with_weights=False
    )
    all_cores = os.sched_getaffinity(0)
    its_core, others = _shares(all_cores)
    upstream = ReservedPort("127.0.0.1", config.upstream_port)
    upstream_url = f"http://127.0.0.1:{upstream.port}"
    async with AsyncExitStack() as stack:
        stack.callback(upstream.close)
        stack.callback(os.sched_setaffinity, 0, all_cores)
        tracings = {PLAIN: TracingConfig()}
        if config.traced:
            collector = await stack.enter_async_context(collecting())
            tracings[TRACED] = TracingConfig(
                otlp_endpoint=collector.url, sampling=config.traced, metrics_s=config.duration_s
            )
        direct = await stack.enter_async_context(chat_target(upstream_url, MODEL))
        servers = [MeasuredServer("direct", direct)]
        for name, tracing in tracings.items():
            # Only the nodes of the first one have the server that is called directly.
            port = upstream.port if name == PLAIN else 0
            cluster = _Simulated(config, checkpoint.model_id, tracing, port)
            servers.append(await stack.enter_async_context(cluster.running(name, its_core, others)))
        os.sched_setaffinity(0, others)
        servers[0] = replace(servers[0], upstream_pid=servers[1].upstream_pid)
        yield servers
        if config.traced:
            collector.check()


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A coordinator, and the process with its simulated nodes."""

    config: CoordinatorBenchConfig
    model_id: str
    tracing: TracingConfig
    upstream_port: int

    @asynccontextmanager
    async def running(
        self, name: str, its_core: Set[int], others: Set[int]
    ) -> AsyncIterator[MeasuredServer]:
        """Run both while the context lasts; ready at its beginning."""
        ports = [ReservedPort("127.0.0.1"), ReservedPort("127.0.0.1")]
        http, grpc = (reserved.port for reserved in ports)
        coordinator = CoordinatorConfig(
            port=http, grpc_port=grpc, checkpoint=self.config.checkpoint, tracing=self.tracing
        )
        nodes = NodesPlan(
            f"127.0.0.1:{grpc}", self.upstream_port, self.model_id, self.config.step_ms
        )
        url = f"http://127.0.0.1:{http}"
        children: list[Child] = []
        try:
            children.append(_spawn(COORDINATOR, [COORDINATOR, *as_flags(coordinator)], its_core))
            children.append(_spawn(SIMULATED, nodes.arguments, others))
            await wait_until(
                lambda s: not s.waiting_for(NODE_IDS),
                partial(fetch_status, url),
                children,
                self.config.start_s,
            )
            async with chat_target(url, (await fetch_status(url)).model) as target:
                pid, nodes_pid = (child.pid for child in children)
                yield MeasuredServer(name, target, pid, nodes_pid)
        finally:
            await asyncio.gather(*(child.stop(_STOP_S) for child in children))
            for reserved in ports:
                reserved.close()


def _spawn(name: str, words: Sequence[str], cores: Set[int]) -> Child:
    argv = [*OWN_COMMAND, *words, f"--die-with-parent={os.getpid()}"]
    child = Child(name, argv, _ignore_line, _ignore_end)
    os.sched_setaffinity(child.pid, cores)  # all its threads: it has only begun
    return child


def _shares(cores: Set[int]) -> tuple[Set[int], Set[int]]:
    """The coordinator's core, and those of everything else; one core is shared."""
    first, *others = sorted(cores)
    return {first}, set(others) or {first}


def _ignore_line(name: str, line: str) -> None:
    """A child keeps its last lines itself, for the error that says how it ended."""


def _ignore_end(end: Exit) -> None:
    """Readiness and the client notice it."""


def _table(report: CoordinatorReport) -> Table:
    table = Table(title="streams at a time are full load; requests a second come at random times")
    table.add_column("answers of")
    table.add_column("load")
    table.add_column("server")
    rates = ("requests/s", "tokens/s", "of a core", "starved", "requests/core-s", "tokens/core-s")
    times = ("TTFT ms", "direct ms", "added ms")
    for column in (*rates, "tokens/event", *times, "failed"):
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            f"{row.output_tokens} tokens",
            _load(row),
            row.server,
            f"{row.requests_per_s:,.0f}",
            f"{row.tokens_per_s:,.0f}",
            _share(row.core_share),
            _share(row.starved_share),
            _figure(row.requests_per_core_s, 0),
            _figure(row.tokens_per_core_s, 0),
            f"{row.tokens_per_event:.2f}",
            _two(row.ttft_ms),
            _two(row.direct_ttft_ms),
            _two(row.added_ttft_ms),
            str(row.failed),
        )
    return table


def _remarks(report: CoordinatorReport) -> list[str]:
    """What would be easy to overlook."""
    said = [
        "times are p50/p99: TTFT from when a request was due, directly, and what the server adds",
        "starved: the share of the time in which the server could have run and had no core",
    ]
    for row in report.rows:
        where = f"{row.server}, answers of {row.output_tokens}, {_load(row)}"
        said.append(
            f"{where}: client and simulated servers took {row.beside_share:.0%} of a core; "
            f"the client sent late by {_figure(row.client_late_ms.p99, 1)} ms (p99)"
        )
        if row.requests_per_s < _KEPT * row.rate:
            said.append(f"{where}: it did not keep up with the rate, so its times only grow")
        said += [f"{where}: {count} times: {text}" for text, count in row.errors.items()]
    return said + [_cost_of_traces(row) for row in report.traced]


def _cost_of_traces(row: TracedRow) -> str:
    what = f"traces, answers of {row.output_tokens}, {_load(row)}"
    if row.median is None:
        return f"{what}: no round was long enough to tell"
    least, most = min(row.ratios), max(row.ratios)
    return (
        f"{what}: {row.median - 1:+.1%} of the coordinator's CPU time for a request "
        f"(rounds from {least - 1:+.1%} to {most - 1:+.1%})"
    )


def _load(row: CoordinatorRow | TracedRow) -> str:
    return str(Load(row.concurrency, row.rate))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _two(figures: Percentiles | AddedTtft) -> str:
    return f"{_figure(figures.p50, 1)}/{_figure(figures.p99, 1)}"
