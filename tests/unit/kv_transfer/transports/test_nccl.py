"""NCCL over pretended GPUs: what is pulled, and what ends that are stuck or dead cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import uvloop

from kv_transfer.transports.nccl.peer import Invitation
from pdserve.protocol import TransportOffer
from pdserve.shared.errors import (
    PeerLost,
    StaleTicket,
    TicketInvalid,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from tests.matrix import matrix
from tests.unit.kv_transfer.gpu_pairs import (
    CHUNK_BYTES,
    GpuPair,
    assert_still,
    nccl,
    open_gpu_pair,
    start,
    until,
)
from tests.unit.kv_transfer.pairs import SMALL, tokens_of
from tests.waits import WITHIN_S, leap

WIDER = msgspec.structs.replace(SMALL, block_size=8)


@pytest.fixture
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(nccl(**getattr(request, "param", {}))) as opened:
        yield opened


an_impatient_puller = pytest.mark.parametrize("pair", [{"end_s": 0.05}], indirect=True)


async def stuck(pair: GpuPair) -> asyncio.Task[object]:
    """A pull whose NCCL gets stuck after the first chunks."""
    task = asyncio.create_task(pair.pull(pair.issue(*[3] * 500), [7] * 500))
    await until(pair.destination.data[7].any)
    pair.host.let(sends=False)
    await asyncio.sleep(0.01)
    assert not task.done()
    return task


async def assert_recovers(pair: GpuPair) -> None:
    """The next pull is complete, over a communicator of its own."""
    pair.host.let(sends=True, aborts=True)
    before = pair.host.num_communicators
    await start(pair)
    assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()
    assert pair.host.num_communicators == before + 2


async def test_blocks_are_pulled_and_counted(pair: GpuPair) -> None:
    result = await start(pair)
    assert result.bytes == 2 * SMALL.block_bytes > 2 * CHUNK_BYTES
    assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()
    pair.destination.data[[7, 9]] = 0
    assert not pair.destination.data.any()
    statistics = pair.exporter.statistics
    assert (statistics.pulls_served, statistics.bytes_sent) == (1, result.bytes)


@pytest.mark.parametrize("chunk_bytes", matrix([7, CHUNK_BYTES, 1 << 20], 2))
@pytest.mark.parametrize(("layout", "other"), [(SMALL, WIDER), (WIDER, SMALL)])
async def test_layouts_may_differ(layout, other, chunk_bytes: int) -> None:
    kind = nccl(chunk_bytes=chunk_bytes)
    async with open_gpu_pair(kind, layout=layout, destination_layout=other) as pair:
        block_ids = [5, 1, 9][: layout.blocks_for(11)]
        table = [2, 7, 4][: other.blocks_for(11)]
        await pair.pull(pair.exporter.issue("r", 0, 11, block_ids), table)
        there = tokens_of(pair.source, layout, block_ids, 0, 11)
        here = tokens_of(pair.destination, other, table, 0, 11)
        assert (there == here).all()


async def test_pulls_take_turns_on_one_communicator(pair: GpuPair) -> None:
    pulls = [pair.pull(pair.issue(block), [15 - block]) for block in range(16)]
    await asyncio.gather(*pulls)
    assert (pair.destination.data == pair.source.data[::-1]).all()
    assert pair.host.num_communicators == 2


async def test_a_block_that_changed_hands_before(pair: GpuPair) -> None:
    ticket = pair.issue(3, 5)
    pair.source.pool.bump([5])
    with pytest.raises(StaleTicket, match="block 5 has generation 1"):
        await pair.pull(ticket, [7, 9])
    assert not pair.destination.data.any()
    await start(pair)
    assert pair.host.num_communicators == 2
    assert pair.exporter.statistics.stale == 1


async def test_a_block_that_changed_hands_on_the_way(pair: GpuPair) -> None:
    task = await stuck(pair)
    pair.source.pool.bump([3])
    pair.host.let(sends=True)
    with pytest.raises(StaleTicket):
        await task
    await start(pair)
    assert pair.host.num_communicators == 2


async def test_a_cancelled_pull_ends_at_once_and_for_good(pair: GpuPair) -> None:
    task = await stuck(pair)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_still(pair.destination)
    pair.host.let(sends=True)
    await assert_still(pair.destination)
    await assert_recovers(pair)


async def test_a_cancelled_scatter_is_waited_for(pair: GpuPair) -> None:
    """It is the one thing that writes to blocks."""

    def hold_copies() -> None:
        pair.host.on_received = lambda: None
        pair.host.let(copies=False)

    pair.host.on_received = hold_copies
    task = start(pair)
    await until(pair.destination.data[7].any)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    pair.host.let(copies=True)
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_still(pair.destination)
    await assert_recovers(pair)


@pytest.mark.parametrize("pair", [{"stall_s": 2 * WITHIN_S}], indirect=True)
async def test_a_pull_that_is_stuck_ends_at_its_deadline(pair: GpuPair) -> None:
    task = await stuck(pair)
    leap(WITHIN_S)
    with pytest.raises(TransferTimeout, match="over nccl took longer"):
        await task
    await assert_still(pair.destination)
    await assert_recovers(pair)


async def test_closing_the_link_cancels_a_pull_that_is_stuck(pair: GpuPair) -> None:
    task = await stuck(pair)
    await pair.link.close()
    with pytest.raises(TransferCancelled):
        await task
    await assert_still(pair.destination)


async def test_the_exporter_notices_a_puller_that_gave_up(pair: GpuPair) -> None:
    task = await stuck(pair)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: pair.exporter.statistics.broken == 1)
    await until(lambda: pair.num_staged == 0)


@pytest.mark.parametrize("pair", [{"stall_s": 1.0}], indirect=True)
async def test_a_stuck_end_is_given_up_after_a_while(pair: GpuPair) -> None:
    task = await stuck(pair)
    with pytest.raises(PeerLost):
        await task
    await assert_still(pair.destination)
    await assert_recovers(pair)


async def test_an_exporter_that_closes_ends_the_pull(pair: GpuPair) -> None:
    task = await stuck(pair)
    await pair.exporter.close()
    with pytest.raises(PeerLost):
        await task
    await assert_still(pair.destination)


@an_impatient_puller
async def test_an_nccl_that_does_not_even_abort_keeps_its_staging_memory(pair: GpuPair) -> None:
    task = await stuck(pair)
    pair.host.let(aborts=False)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_still(pair.destination)
    await asyncio.sleep(0.1)
    assert pair.num_staged == 2  # one for each end
    await assert_recovers(pair)
    await until(lambda: pair.num_staged == 2)  # of the new communicator


async def test_an_abort_that_fails_leaves_nothing_behind() -> None:
    async with open_gpu_pair(nccl()) as pair:
        pair.host.abort_error = "unhandled system error"
        task = await stuck(pair)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: pair.num_staged == 0)
    await until(lambda: not any(t.name.startswith("kv-nccl") for t in threading.enumerate()))


async def test_a_copy_that_fails_at_the_exporter_ends_the_pull(pair: GpuPair) -> None:
    pair.host.copy_error = "an illegal address"
    with pytest.raises(PeerLost):
        await start(pair)
    assert not pair.destination.data.any()
    pair.host.copy_error = ""
    await assert_recovers(pair)


@pytest.mark.parametrize("forge", [lambda t: t[:-1] + bytes([t[-1] ^ 1]), lambda t: t + b"\0"])
async def test_a_forged_ticket_moves_nothing(pair: GpuPair, forge) -> None:
    good = pair.issue(3, 5)
    with pytest.raises(TicketInvalid):
        await pair.pull(forge(good), [7, 9])
    assert not pair.destination.data.any()
    await pair.pull(good, [7, 9])
    assert pair.host.num_communicators == 2


async def test_without_access_there_is_no_communicator(pair: GpuPair) -> None:
    await pair.pull(pair.issue(3), [7])  # both ends of the pair's own have joined
    welcome = msgspec.structs.replace(pair.exporter.welcome(), access=bytes(32))
    with pytest.raises(PeerLost, match="nccl"):
        await pair.puller.connect(welcome, 30)
    assert pair.exporter.statistics.refused == 1
    assert pair.host.num_communicators == 2


async def test_access_that_has_ended_is_refused(pair: GpuPair) -> None:
    welcome = pair.exporter.welcome()
    link = await pair.puller.connect(welcome, 30)
    pair.exporter.dismiss(welcome)
    with pytest.raises(TransferError):
        await pair.puller.pull(link, pair.issue(3), [7], 0, 5)
    assert not pair.destination.data.any()
    await link.close()


async def test_two_processes_on_one_gpu_are_an_obstacle(pair: GpuPair) -> None:
    (offer,) = pair.exporter.offers
    same = msgspec.structs.replace(offer, metadata=b"0000:01:00.0")
    welcome = msgspec.structs.replace(pair.exporter.welcome(), offers=[same])
    with pytest.raises(PeerLost, match=r"both processes are on GPU 0000:01:00\.0"):
        await pair.puller.connect(welcome, 30)


@pytest.mark.parametrize(
    "invitation",
    [
        Invitation(bytes(127), 1000),
        Invitation(bytes(128), 0),
        Invitation(bytes(128), (64 << 20) + 1),
    ],
)
async def test_an_invitation_that_cannot_be_one(pair: GpuPair, invitation: Invitation) -> None:
    with pytest.raises(PeerLost, match="received an invitation"):
        await connect_to(pair, invitation)


@an_impatient_puller
async def test_an_exporter_that_never_joins(pair: GpuPair) -> None:
    invitation = Invitation(pair.host.new_pair(), 1000)
    with pytest.raises(TransferTimeout, match="nccl: no answer in time"):
        await connect_to(pair, invitation, timeout_s=0.2)
    assert pair.num_staged == 2  # nothing of the GPU was taken on its word
    await asyncio.to_thread(pair.host.driver().join, invitation.communicator_id, 0)
    await until(lambda: pair.host.pairs[invitation.communicator_id].aborted == {1})
    await until(lambda: pair.num_staged == 2)


async def connect_to(pair: GpuPair, invitation: Invitation, timeout_s: float = 5) -> None:
    """Have the puller connect to a server that says this and then nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4 + 32)
        body = msgspec.msgpack.encode(invitation)
        writer.write(b"pdKV" + len(body).to_bytes(4, "big") + body)
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        offer = TransportOffer(name="nccl", endpoint=f"127.0.0.1:{port}")
        welcome = msgspec.structs.replace(pair.exporter.welcome(), offers=[offer])
        await pair.puller.connect(welcome, timeout_s)


@pytest.mark.parametrize("pair", [{"join_s": 0.5}], indirect=True)
async def test_a_puller_that_never_joins_is_given_up(pair: GpuPair) -> None:
    host, _, port = pair.exporter.offers[0].endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"pdKV" + pair.exporter.welcome().access)
    async with asyncio.timeout(30):
        assert b"pdKV" in await reader.read()  # the invitation, and then the end
    writer.close()
    await writer.wait_closed()
    assert pair.exporter.statistics.broken == 1
    pair.host.close()


async def test_no_thread_stays_behind() -> None:
    async with open_gpu_pair(nccl()) as pair:
        for _ in range(5):
            task = await stuck(pair)
            task.cancel()
            await asyncio.wait([task])
            await assert_recovers(pair)
    await until(lambda: not any(t.name.startswith("kv-nccl") for t in threading.enumerate()))


def test_it_works_on_uvloop() -> None:
    async def scenario() -> None:
        async with open_gpu_pair(nccl()) as pair:
            task = await stuck(pair)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await assert_still(pair.destination)
            await assert_recovers(pair)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
