"""What a decode step costs besides the model: planning, batch, sampling, messages.

Closed-loop streams keep the decode batch at one size. The node's own histograms are read while all
of them are in the batch, first and last; the difference is steady state only.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from pdserve.bench.load import open_client
from pdserve.bench.scrape import Samples, between, scrape
from pdserve.errors import ClusterError

PROMPT_TOKENS = 16
LOOK_S = 0.05  # between two looks at the node


class OverheadRow(msgspec.Struct, frozen=True):
    """One batch size. Times in milliseconds."""

    batch: int
    steps: int
    model_ms: float
    overhead_ms: float
    overhead_p50_ms: float
    overhead_p90_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class _Look:
    """The node's metrics at a time."""

    samples: Samples
    at_s: float


async def measure_overhead(
    url: str, model: str, metrics_address: str, batch: int, num_tokens: int, deadline_s: float
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
            while not any(stream.done() for stream in streams):
                look = _Look(await scrape(metrics_address), time.perf_counter())
                if look.samples["pdserve_running_requests"] == batch:
                    looks.append(look)
                await asyncio.wait(streams, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    except* TimeoutError:
        failure = ClusterError(f"{batch} streams were not done within {deadline_s} s")
    except* ClusterError as errors:
        failure = ClusterError(str(errors.exceptions[0]))
    if failure is not None:
        raise failure
    if len(looks) < 2:
        raise ClusterError(
            f"{batch} streams of {num_tokens} tokens were never together in the batch for long: "
            "take more tokens"
        )
    return _row(batch, looks[0], looks[-1])


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
        tokens_per_s=tokens / (last.at_s - first.at_s),
    )


def _prompt(index: int) -> list[int]:
    """Of its own for each stream, so that no prefix is shared."""
    return [20 + (index * 7 + i) % 200 for i in range(PROMPT_TOKENS)]
