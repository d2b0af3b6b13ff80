"""The overhead of a decode step besides the model: planning, batch, sampling, messages.

Closed-loop streams keep the decode batch at one size. The node's own histograms are read at the
beginning and the end of the time in which all streams are in the batch, so their difference is
steady state only. They are read ever less often, since composing them takes the node as long as
several steps.

If client, coordinator and nodes share few cores, most of the overhead may be waiting for a core.
`starved_ms` shows how long the node's event loop waited, for other processes or for the thread of
its own engine.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from pdserve.bench.cpu_time import starved_seconds
from pdserve.bench.load.client import open_client
from pdserve.cluster.scrape import Samples, between, scrape
from pdserve.errors import ClusterError

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
    url: str, model: str, node: WatchedNode, batch: int, num_tokens: int, deadline_s: float
) -> OverheadRow:
    """Run `batch` streams of `num_tokens` tokens each, and read the decode node's histograms.

    Raises:
        ClusterError: a stream broke, the streams were not done within `deadline_s`, or never all
            in the batch together.
    """
    looks: list[_Look] = []
    failure: ClusterError | None = None
    try:
        async with (
            asyncio.timeout(deadline_s),
            open_client(url, model) as client,
            asyncio.TaskGroup() as tasks,
        ):
            streams = [
                tasks.create_task(client.stream(_prompt(index), num_tokens))
                for index in range(batch)
            ]
            pause_s = FIRST_PAUSE_S
            while not any(stream.done() for stream in streams):
                look = await _look(node)
                if look.samples["pdserve_running_requests"] == batch:
                    looks.append(look)
                    pause_s *= 2
                await asyncio.wait(streams, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
    except* TimeoutError:
        failure = ClusterError(f"{batch} streams were not done within {deadline_s} s")
    except* ClusterError as errors:
        failure = ClusterError(str(errors.exceptions[0]))
    if failure is not None:
        raise failure
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
