"""cuda_ipc over pretended GPUs: the copy, the fence, and what an exporter's end does to a read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import uvloop

from kv_transfer.memory import GENERATION_BYTES
from kv_transfer.ticket import read_ticket
from pdserve.shared.errors import PeerLost, StaleTicket, TransferCancelled, TransferTimeout
from pdserve.shared.process.shared_memory import sealed_memory
from tests.fakes.gpus import FakeHost
from tests.unit.kv_transfer.gpu_pairs import (
    CUDA_IPC,
    GpuPair,
    assert_still,
    make_exporter,
    nccl,
    open_gpu_pair,
    start,
    until,
)
from tests.unit.kv_transfer.pairs import SMALL, tokens_of
from tests.waits import WITHIN_S, leap, turn

WIDER = msgspec.structs.replace(SMALL, block_size=8)


@pytest.fixture
async def pair() -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(CUDA_IPC) as opened:
        yield opened


async def hanging(pair: GpuPair) -> asyncio.Task[object]:
    """The same, in the middle of its copy."""
    pair.host.let(copies=False)
    task = start(pair)
    await until(pair.destination.data[7].any)
    return task


async def test_blocks_are_copied_and_counted(pair: GpuPair) -> None:
    result = await pair.pull(pair.issue(3, 5), [7, 9])
    assert result.bytes == 2 * SMALL.block_bytes
    assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()
    pair.destination.data[[7, 9]] = 0
    assert not pair.destination.data.any()
    assert pair.exporter.statistics.pools_shared == 1


@pytest.mark.parametrize(("layout", "other"), [(SMALL, WIDER), (WIDER, SMALL)])
async def test_layouts_may_differ(layout, other) -> None:
    async with open_gpu_pair(CUDA_IPC, layout=layout, destination_layout=other) as pair:
        block_ids = [5, 1, 9][: layout.blocks_for(11)]
        ticket = pair.exporter.issue("r", 0, 11, block_ids)
        table = [2, 7, 4][: other.blocks_for(11)]
        await pair.pull(ticket, table)
        there = tokens_of(pair.source, layout, block_ids, 0, 11)
        here = tokens_of(pair.destination, other, table, 0, 11)
        assert (there == here).all()


async def test_an_exporters_memory_is_opened_once(pair: GpuPair) -> None:
    links = [await pair.puller.connect(pair.exporter.welcome(), 30) for _ in range(3)]
    assert pair.host.num_opened == 1
    for link in [*links, pair.link]:
        assert pair.host.num_opened == 1
        await link.close()
    assert pair.host.num_opened == 0


async def test_a_block_that_changed_hands_before(pair: GpuPair) -> None:
    ticket = pair.issue(3, 5)
    pair.source.pool.bump([5])
    with pytest.raises(StaleTicket, match="block 5 has generation 1"):
        await pair.pull(ticket, [7, 9])


async def test_a_block_that_changed_hands_during_the_copy(pair: GpuPair) -> None:
    task = await hanging(pair)
    pair.source.pool.bump([3])
    pair.host.let(copies=True)
    with pytest.raises(StaleTicket):
        await task


async def test_a_cancelled_pull_waits_for_the_gpu(pair: GpuPair) -> None:
    task = await hanging(pair)
    for _ in range(3):  # neither does a second cancellation help
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    pair.host.let(copies=True)
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_still(pair.destination)
    await pair.pull(pair.issue(3), [7])


async def test_a_deadline_waits_for_the_gpu(pair: GpuPair) -> None:
    task = await hanging(pair)
    leap(WITHIN_S)
    await turn()
    assert not task.done()
    pair.host.let(copies=True)
    with pytest.raises(TransferTimeout, match="over cuda_ipc took longer"):
        await task
    await assert_still(pair.destination)


async def test_closing_the_link_waits_for_the_gpu(pair: GpuPair) -> None:
    task = await hanging(pair)
    closing = asyncio.create_task(pair.link.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    assert pair.host.num_opened == 1
    pair.host.let(copies=True)
    await closing
    with pytest.raises(TransferCancelled):
        await task
    assert pair.host.num_opened == 0


async def test_a_copy_is_not_believed_when_the_exporter_has_gone(pair: GpuPair) -> None:
    """Its generations still fit, but what its memory was is anybody's guess."""
    task = await hanging(pair)
    await pair.exporter.close()
    pair.host.let(copies=True)
    with pytest.raises(PeerLost, match="closed its pool or died"):
        await task
    with pytest.raises(PeerLost):
        await start(pair)


async def test_a_copy_that_fails_is_tried_again(pair: GpuPair) -> None:
    pair.host.copy_error = "an illegal address"
    with pytest.raises(PeerLost, match="the exporter's GPU failed: an illegal address"):
        await start(pair)
    pair.host.copy_error = ""
    await start(pair)
    assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()


async def test_without_access_there_is_no_handle(pair: GpuPair) -> None:
    welcome = msgspec.structs.replace(pair.exporter.welcome(), access=bytes(32))
    with pytest.raises(PeerLost, match="cuda_ipc"):
        await pair.puller.connect(welcome, 30)
    assert pair.exporter.statistics.refused == 1
    assert pair.host.num_opened == 1


async def test_another_host_is_an_obstacle(pair: GpuPair) -> None:
    welcome = msgspec.structs.replace(pair.exporter.welcome(), host_id="elsewhere")
    with pytest.raises(PeerLost, match="cuda_ipc: another host"):
        await pair.puller.connect(welcome, 30)


async def test_a_pool_of_another_size_is_refused(pair: GpuPair) -> None:
    welcome = msgspec.structs.replace(pair.exporter.welcome(), num_blocks=17)
    with pytest.raises(PeerLost, match="a pool of 16 blocks"):
        await pair.puller.connect(welcome, 30)
    assert pair.host.num_opened == 1


async def test_a_gpu_that_cannot_be_reached_leaves_the_next_transport() -> None:
    host = FakeHost()
    host.errors["open"] = "peer access is not supported between these two devices"
    async with open_gpu_pair(CUDA_IPC, nccl(), host=host) as pair:
        assert pair.link.transport == "nccl"
        assert "cuda_ipc: the exporter's GPU 0000:00:00.0: peer access" in pair.link.reason
        await start(pair)
        assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()


async def test_an_exporter_without_cuda_ipc_says_so() -> None:
    host = FakeHost()
    host.errors["export"] = "operation not supported"
    async with open_gpu_pair(CUDA_IPC, nccl(), host=host) as pair:
        assert pair.exporter.offers[0].unavailable == "operation not supported"
        assert "p0 cannot: operation not supported" in pair.link.reason


async def test_a_handle_that_is_none_is_not_opened() -> None:
    host = FakeHost()
    host.handle_bytes -= 1
    async with open_gpu_pair(CUDA_IPC, nccl(), host=host) as pair:
        assert pair.link.transport == "nccl"
        assert "cuda_ipc: received a handle of 63 bytes" in pair.link.reason


@pytest.mark.parametrize(
    ("is_open", "message"),
    [
        (False, r"GPU 0000:00:00\.0: invalid argument"),
        (True, "16384 bytes is announced as 67108864"),
    ],
)
async def test_an_exporter_that_has_less_than_it_says(
    pair: GpuPair, is_open: bool, message: str
) -> None:
    """Found at once, by a copy that can fail: a kernel that reads there takes the GPU from us."""
    if not is_open:
        await pair.link.close()
    pool = pair.source.pool
    pool.close()
    pool.num_blocks = 1 << 16
    pool.fd, _ = sealed_memory("as announced", pool.num_blocks * GENERATION_BYTES)
    liar = make_exporter(pool, SMALL, [CUDA_IPC])
    await liar.start("127.0.0.1")
    with pytest.raises(PeerLost, match=message):
        await pair.puller.connect(liar.welcome(), 30)
    assert pair.host.num_opened == is_open
    await liar.close()


async def test_checksums_are_not_checked_on_a_gpu(
    pair: GpuPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter with a pool in CPU memory may have made some."""
    wrong = bytes(8 * 2 * SMALL.num_kv_heads)
    monkeypatch.setattr(pair.exporter, "_checksums", lambda *_: wrong)
    ticket = pair.issue(3, 5)
    assert read_ticket(ticket).checksums == wrong
    await pair.pull(ticket, [7, 9])
    assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()


@pytest.mark.parametrize("closes", [True, False])
async def test_memory_that_was_opened_too_late_is_closed_again(pair: GpuPair, closes: bool) -> None:
    """Whether CUDA closes it well or not, the cancellation stays one."""
    await pair.link.close()
    pair.host.is_opening.clear()
    pair.host.let(opens=False)
    if not closes:
        pair.host.errors["close"] = "its owner is dead"
    task = asyncio.create_task(pair.puller.connect(pair.exporter.welcome(), 60))
    await until(pair.host.is_opening.is_set)
    task.cancel()
    await asyncio.sleep(0)
    pair.host.let(opens=True)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.host.num_opened == 0


def test_it_works_on_uvloop() -> None:
    async def scenario() -> None:
        async with open_gpu_pair(CUDA_IPC) as pair:
            task = await hanging(pair)
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            pair.host.let(copies=True)
            with pytest.raises(asyncio.CancelledError):
                await task
            await assert_still(pair.destination)
            await start(pair)
            assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
