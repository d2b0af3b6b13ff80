"""The arithmetic of the transfer benchmark, and what it does with two ends that are not real."""

from __future__ import annotations

import itertools
from typing import TypeVar

import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.memory import ExportedPool
from pdserve.commands.bench.transfer.ends import LAYER_BYTES, layout_of
from pdserve.commands.bench.transfer.measurement import (
    MIN_PULLS,
    PullCase,
    SkippedTransport,
    count_blocks,
    count_pulls,
    make_row,
    measure_transport,
    random_blocks,
)
from pdserve.commands.bench.transfer.wire import (
    BenchMessage,
    ConnectedTo,
    ConnectTo,
    Cpu,
    Issue,
    Issued,
    Measure,
    PullTimes,
    Request,
    Served,
    Verified,
    Verify,
)
from pdserve.protocol import ExporterWelcome
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import ConfigError

R = TypeVar("R", bound=BenchMessage)

CASE = PullCase(
    "loopback", block_bytes=1_000_000, pool_blocks=50, counts=[4, 20], pull_s=1.0, commit=False
)


class Scripted:
    """An end that answers from a list of replies by kind; remembers what it was asked."""

    has_huge_pages = False

    def __init__(self, *replies: BenchMessage) -> None:
        self._replies = list(replies)
        self.asked: list[Request] = []

    async def ask(self, request: Request, reply: type[R]) -> R:
        self.asked.append(request)
        if isinstance(request, Issue):
            found: BenchMessage = Issued([b"%d" % len(ids) for ids in request.block_ids])
        elif isinstance(request, Measure):
            found = PullTimes(*([1e-3] * len(request.orders) for _ in range(3)))
        else:
            found = self._replies.pop(0)
        assert isinstance(found, reply)
        return found


def welcome() -> ExporterWelcome:
    layout = layout_of(LAYER_BYTES)
    pool = ExportedPool(1, layout.block_bytes)
    identity = KvIdentity("benchmark", "", layout)
    exporter = Exporter("exporter", "life", identity, pool, SystemClock(), [])
    pool.close()
    return exporter.welcome()


def test_a_row_is_the_medians_of_its_pulls() -> None:
    measured = PullTimes(
        pull_s=[0.002, 0.001, 0.010],
        pull_cpu_s=[0.002, 0.001, 0.003],
        memcpy_s=[0.001, 0.001, 0.002],
    )
    row = make_row("shm", CASE, 4, measured, exporter_cpu_s=0.006, huge_pages=True)
    assert (row.transport, row.network, row.block_bytes, row.blocks, row.pulls) == (
        "shm",
        "loopback",
        1_000_000,
        4,
        3,
    )
    assert row.gb_per_s == pytest.approx(0.004 / 0.002)
    assert row.memcpy_gb_per_s == pytest.approx(0.004 / 0.001)
    assert row.memcpy_ratio == pytest.approx(0.5)  # of 0.5, 1.0 and 0.2: not a ratio of medians
    assert row.pull_us == pytest.approx(2000)
    assert row.cpu_s_per_gb == pytest.approx(0.012 / 0.012)


def test_blocks_are_as_many_as_the_memory_holds() -> None:
    assert count_blocks([16, 1, 2048], 1 << 20, 100 << 20) == (100, [1, 16, 100])
    assert count_blocks([256, 2048], 1 << 20, 100 << 20) == (100, [100])
    assert count_blocks([16], 1 << 20, 100 << 20) == (16, [16])
    with pytest.raises(ConfigError, match="hold no block of 1048576 bytes"):
        count_blocks([1], 1 << 20, 1 << 19)


def test_small_pulls_are_repeated_more_often() -> None:
    assert count_pulls(64 << 10) == 100
    assert count_pulls(64 << 20) == 16
    assert count_pulls(4 << 30) == MIN_PULLS


def test_blocks_are_random_but_the_same_in_every_run() -> None:
    first, second = itertools.islice(random_blocks(100, 40, seed=1), 2)
    assert len(set(first)) == 40
    assert set(first) <= set(range(100))
    assert first != sorted(first)
    assert first != second
    assert next(random_blocks(100, 40, seed=1)) == first


def test_a_block_is_a_whole_number_of_layers() -> None:
    assert layout_of(2 << 20).block_bytes == 2 << 20
    with pytest.raises(ConfigError, match=f"multiple of {LAYER_BYTES}"):
        layout_of(LAYER_BYTES + 1024)
    with pytest.raises(ConfigError, match="multiple"):
        layout_of(0)


async def test_the_pool_is_verified_and_each_count_measured_with_fresh_blocks() -> None:
    cpu = [Cpu(0.5), Cpu(0.5), Cpu(1.0), Cpu(1.5)]
    exporter = Scripted(Served(welcome()), *cpu)
    puller = Scripted(ConnectedTo(), Verified())
    rows = await measure_transport(exporter, puller, "shm", CASE, "127.0.0.1")
    assert not isinstance(rows, SkippedTransport)
    assert [row.blocks for row in rows] == [4, 20]
    pull_gb = 0.02
    assert rows[1].cpu_s_per_gb == pytest.approx(0.5 / (pull_gb * rows[1].pulls) + 1e-3 / pull_gb)
    (verified,) = [request for request in puller.asked if isinstance(request, Verify)]
    assert sorted(verified.order.source_ids) == list(range(CASE.pool_blocks))
    measured = [request for request in puller.asked if isinstance(request, Measure)]
    for order in measured[0].orders:
        assert order.ticket == b"4"
        assert len(order.source_ids) == len(order.destination_ids) == 4
    sources = [tuple(order.source_ids) for order in measured[0].orders]
    assert len(set(sources)) == len(sources)
    assert sources != [tuple(order.destination_ids) for order in measured[0].orders]


async def test_what_cannot_be_served_is_skipped_with_the_exporters_reason() -> None:
    exporter, puller = Scripted(Served(None, "no such device")), Scripted()
    found = await measure_transport(exporter, puller, "ucx", CASE, "127.0.0.1")
    assert found == SkippedTransport("ucx", "loopback", "no such device")
    assert puller.asked == []


async def test_what_cannot_be_connected_is_skipped_with_the_pullers_reason() -> None:
    exporter = Scripted(Served(welcome()))
    puller = Scripted(ConnectedTo("another host"))
    found = await measure_transport(exporter, puller, "shm", CASE, "192.0.2.1")
    assert found == SkippedTransport("shm", "loopback", "another host")
    assert isinstance(puller.asked[0], ConnectTo)
