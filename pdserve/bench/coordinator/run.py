"""`pdserve bench coordinator`: a real coordinator, all of whose nodes are simulated.

The coordinator has one core to itself, threads of gRPC included, as far as there are several; the
simulated nodes, in one process, and the client share the others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop
from rich.table import Table

from pdserve.bench.coordinator.chat_stream import chat_target
from pdserve.bench.coordinator.config import CoordinatorBenchConfig
from pdserve.bench.coordinator.load import MeasuredServer
from pdserve.bench.coordinator.measurement import (
    AddedTtft,
    CoordinatorReport,
    CoordinatorRow,
    measure_servers,
)
from pdserve.bench.coordinator.simulated_nodes import NODE_IDS, SIMULATED, NodesPlan
from pdserve.bench.coordinator.sse_server import MODEL
from pdserve.bench.load.outcome import Percentiles
from pdserve.bench.output import print_json, print_tables, say
from pdserve.bench.serve.config import Load
from pdserve.cluster.child import Child, Exit
from pdserve.cluster.coordinator_http import key_headers
from pdserve.cluster.plan import COORDINATOR
from pdserve.cluster.ports import ReservedPort
from pdserve.cluster.readiness import wait_until
from pdserve.cluster.status import fetch_status
from pdserve.cluster.supervisor import OWN_COMMAND
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.process.exit_codes import FAILED, OK
from pdserve.settings.config import CoordinatorConfig
from pdserve.settings.flags import as_flags

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
    """The simulated server to call directly, and the coordinator; both ready."""
    given = config.checkpoint
    checkpoint = resolve_checkpoint(
        given.model or str(CHECKPOINT_PATH), given.revision, with_weights=False
    )
    ports = [ReservedPort("127.0.0.1", port) for port in (0, 0, config.upstream_port)]
    http, grpc, upstream = (reserved.port for reserved in ports)
    coordinator = CoordinatorConfig(port=http, grpc_port=grpc, checkpoint=given)
    nodes = NodesPlan(f"127.0.0.1:{grpc}", upstream, checkpoint.model_id, config.step_ms)
    url = f"http://127.0.0.1:{http}"
    all_cores = os.sched_getaffinity(0)
    its_core, others = _shares(all_cores)
    children: list[Child] = []
    try:
        children.append(_spawn(COORDINATOR, [COORDINATOR, *as_flags(coordinator)], its_core))
        children.append(_spawn(SIMULATED, nodes.arguments, others))
        os.sched_setaffinity(0, others)
        await wait_until(lambda s: not s.waiting_for(NODE_IDS), url, children, config.start_s)
        model = (await fetch_status(url)).model
        async with (
            chat_target(f"http://127.0.0.1:{upstream}", MODEL) as direct,
            chat_target(url, model) as ours,
        ):
            pid, nodes_pid = (child.pid for child in children)
            yield [
                MeasuredServer("direct", direct, upstream_pid=nodes_pid),
                MeasuredServer(COORDINATOR, ours, pid, nodes_pid),
            ]
    finally:
        os.sched_setaffinity(0, all_cores)
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
    return said


def _load(row: CoordinatorRow) -> str:
    return str(Load(row.concurrency, row.rate))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _two(figures: Percentiles | AddedTtft) -> str:
    return f"{_figure(figures.p50, 1)}/{_figure(figures.p99, 1)}"
