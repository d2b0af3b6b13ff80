"""Measures how fast KV moves between two processes, against a memcpy of as many blocks.

A row is one transport, network, block size and number of blocks: random blocks of the exporter's
pool go to random blocks of the puller's pool, different ones with every pull. Before or after each
pull the puller copies as many blocks with memcpy, so that both are measured at the same moment,
even on a busy machine. Before the first row, a pull of the whole pool is compared byte by byte.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

import msgspec

from pdserve.commands.bench.transfer.wire import (
    AskCpu,
    BenchMessage,
    ConnectedTo,
    ConnectTo,
    Cpu,
    Issue,
    Issued,
    Measure,
    PullOrder,
    PullTimes,
    Request,
    Serve,
    Served,
    Verified,
    Verify,
)
from pdserve.engine.ranks.sizes import ONE_RANK, Parallelism
from pdserve.shared.errors import ConfigError

MIN_PULLS = 5
_MAX_PULLS = 100
_ROW_BYTES = 1 << 30  # approximate total of a row's pulls, within these bounds

R = TypeVar("R", bound=BenchMessage)


class TransferRow(msgspec.Struct, frozen=True):
    """One measurement. A GB is 10^9 bytes; medians are over the pulls."""

    transport: str
    network: str
    block_bytes: int
    blocks: int  # blocks per pull
    pulls: int
    gb_per_s: float  # median
    memcpy_gb_per_s: float  # median, of one thread in the puller; on a GPU of one device copy
    memcpy_ratio: float  # median ratio of each pull's speed to that of its memcpy
    pull_us: float  # median
    cpu_s_per_gb: float  # user and system time of both processes, pulls only
    huge_pages: bool  # whether all pools use them
    devices: tuple[str, str]  # of the exporter's and the puller's pools
    parts: int  # of each pool; memcpy is that of one of them, as if all copied at once


class SkippedTransport(msgspec.Struct, frozen=True):
    """A transport that could not be measured."""

    transport: str
    network: str
    reason: str


class TransferReport(msgspec.Struct, frozen=True):
    """The results of one run."""

    rows: list[TransferRow]
    skipped: list[SkippedTransport]


@dataclass(frozen=True, slots=True)
class PullCase:
    """The measurements of one pair of processes, transport by transport."""

    network: str
    block_bytes: int
    pool_blocks: int  # of each pool
    counts: Sequence[int]  # blocks per pull, one row each
    pull_s: float  # deadline of one pull
    commit: bool  # whether pools allocate all memory at once, in huge pages if available
    devices: tuple[str, str] = ("cpu", "cpu")  # of the exporter's and the puller's pools
    parallelism: Parallelism = ONE_RANK  # of nodes with such pools: a part for each rank


class End(Protocol):
    """A process of the benchmark, as seen by the benchmark."""

    has_huge_pages: bool  # in all of its pools

    async def ask(self, request: Request, reply: type[R]) -> R:
        """Send a request and return the reply.

        Raises:
            ClusterError: the process ended instead, or did not answer in time.
        """
        ...


def count_blocks(
    wanted: Sequence[int], block_bytes: int, memory_bytes: int
) -> tuple[int, list[int]]:
    """Return (blocks of each pool, blocks of each pull): `wanted`, as far as memory suffices.

    Raises:
        ConfigError: not even one block fits.
    """
    most = memory_bytes // block_bytes
    if most == 0:
        raise ConfigError(f"pools of {memory_bytes} bytes hold no block of {block_bytes} bytes")
    counts = sorted({min(count, most) for count in wanted})
    return counts[-1], counts


def count_pulls(pull_bytes: int) -> int:
    """Return how many pulls of that size make a row."""
    return max(MIN_PULLS, min(_MAX_PULLS, _ROW_BYTES // pull_bytes))


async def measure_transport(
    exporter: End, puller: End, transport: str, case: PullCase, host: str
) -> list[TransferRow] | SkippedTransport:
    """Measure every row of one transport, or return why it was skipped.

    Raises:
        ClusterError: one of the processes has ended, or does not answer.
    """
    served = await exporter.ask(Serve(transport, host), Served)
    if served.welcome is None:
        return SkippedTransport(transport, case.network, served.obstacle)
    connected = await puller.ask(ConnectTo(transport, served.welcome), ConnectedTo)
    if connected.obstacle:
        return SkippedTransport(transport, case.network, connected.obstacle)
    # Pull all blocks once, so that every page is mapped on both sides before the measurement.
    (order,) = await _orders(exporter, case, case.pool_blocks, 1)
    await puller.ask(Verify(order, case.pull_s), Verified)
    return [await _measure_row(exporter, puller, transport, case, count) for count in case.counts]


async def _measure_row(
    exporter: End, puller: End, transport: str, case: PullCase, count: int
) -> TransferRow:
    orders = await _orders(exporter, case, count, count_pulls(count * case.block_bytes))
    before = await exporter.ask(AskCpu(), Cpu)
    measured = await puller.ask(Measure(orders, case.pull_s), PullTimes)
    after = await exporter.ask(AskCpu(), Cpu)
    return make_row(
        transport,
        case,
        count,
        measured,
        after.used_s - before.used_s,
        huge_pages=exporter.has_huge_pages and puller.has_huge_pages,
    )


async def _orders(exporter: End, case: PullCase, count: int, num_orders: int) -> list[PullOrder]:
    ids = itertools.islice(random_blocks(case.pool_blocks, count, seed=count), 2 * num_orders)
    sources, destinations = list(itertools.islice(ids, num_orders)), list(ids)
    issued = await exporter.ask(Issue(sources), Issued)
    return [PullOrder(*parts) for parts in zip(issued.tickets, sources, destinations, strict=True)]


def random_blocks(pool_blocks: int, count: int, seed: int) -> Iterator[list[int]]:
    """Yield lists of `count` distinct blocks, without end; the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield rng.sample(range(pool_blocks), count)


def make_row(
    transport: str,
    case: PullCase,
    count: int,
    measured: PullTimes,
    exporter_cpu_s: float,
    *,
    huge_pages: bool,
) -> TransferRow:
    """Compute a row from the measured times."""
    pull_gb = count * case.block_bytes / 1e9
    pull_s = median(measured.pull_s)
    ratios = [
        memcpy_s / pull_s
        for memcpy_s, pull_s in zip(measured.memcpy_s, measured.pull_s, strict=True)
    ]
    cpu_s = sum(measured.pull_cpu_s) + exporter_cpu_s
    return TransferRow(
        transport=transport,
        network=case.network,
        block_bytes=case.block_bytes,
        blocks=count,
        pulls=len(measured.pull_s),
        gb_per_s=pull_gb / pull_s,
        memcpy_gb_per_s=pull_gb / median(measured.memcpy_s),
        memcpy_ratio=median(ratios),
        pull_us=pull_s * 1e6,
        cpu_s_per_gb=cpu_s / (pull_gb * len(measured.pull_s)),
        huge_pages=huge_pages,
        devices=case.devices,
        parts=case.parallelism.num_ranks,
    )
