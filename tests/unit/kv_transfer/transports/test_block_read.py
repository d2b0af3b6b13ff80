"""Reads of few blocks do what planned reads do, natively and over sockets that are full."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.memory import STALE, ExportedPool
from kv_transfer.ticket import Ticket, read_ticket
from kv_transfer.transports.block_answers import BlockAnswers
from kv_transfer.transports.block_read import BlockRead, planner_of
from kv_transfer.transports.frames import (
    VALID,
    PullRequest,
    PullVerdict,
    first_frame,
    frame_bytes,
)
from kv_transfer.transports.sockets import Watch
from pdserve import _native
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import StaleTicket
from tests.matrix import examples
from tests.unit.kv_transfer.pairs import LARGE, SMALL, make_exporter, make_pool, open_pair

NUM_BLOCKS = 12
SOURCE, TARGET = (make_pool(SMALL, NUM_BLOCKS, seed) for seed in (1, None))


def read_of(
    source: ExportedPool,
    target: ExportedPool,
    layout: KvLayout,
    first_token: int,
    num_tokens: int,
    from_token: int = 0,
) -> BlockRead | None:
    """A read of descending blocks of `source` into ascending ones."""
    exporter, _ = make_exporter(source, layout)
    first, end = first_token // layout.block_size, layout.blocks_for(first_token + num_tokens)
    blocks = [NUM_BLOCKS - 1 - block for block in range(first, end)]
    sealed = exporter.issue("r", first_token, num_tokens, blocks)
    planner = planner_of(layout, target)
    assert planner is not None
    return planner.read(sealed, read_ticket(sealed), range(NUM_BLOCKS), from_token, target)


def copied(read: BlockRead, source: ExportedPool) -> int:
    rows = read.rows
    return _native.copy_blocks(
        read.destination.flat,
        source.flat,
        rows.block_bytes,
        read.destination_ids,
        read.source_ids,
        rows.rows,
        rows.last_rows,
        source.generations,
        read.generations,
        read.sums,
    )


@settings(max_examples=examples(60))
@given(
    first_token=st.integers(0, 20),
    num_tokens=st.integers(1, 24),
    from_token=st.integers(0, 30),
    flipped=st.integers(0, 10_000),
)
def test_a_copy_is_that_of_the_planned_read(
    first_token: int, num_tokens: int, from_token: int, flipped: int
) -> None:
    read = read_of(SOURCE, TARGET, SMALL, first_token, num_tokens, from_token)
    begin = max(first_token, from_token)
    if begin % SMALL.block_size or begin >= first_token + num_tokens:
        assert read is None
        return
    assert read is not None
    planned = read.planned()
    TARGET.data[:] = 0
    _native.copy_spans(TARGET.flat, SOURCE.flat, planned.spans, np.zeros(1, np.uint8))
    expected = TARGET.data.copy()
    TARGET.data[:] = 0
    assert copied(read, SOURCE) == -1
    np.testing.assert_array_equal(TARGET.data, expected)
    assert read.num_bytes == planned.num_bytes == planned.spans[:, 2].sum()
    assert read.find_wrong() == -1
    # Whatever byte is wrong, its block is named, on the way and afterwards.
    span = planned.spans[flipped % len(planned.spans)]
    place = flipped % int(span[2])
    wrong = read.destination_ids.index(int(span[1] + place) // SMALL.block_bytes)
    TARGET.flat[span[1] + place] ^= 1
    read.wrong = None
    assert read.find_wrong() == wrong
    SOURCE.flat[span[0] + place] ^= 1
    found = copied(read, SOURCE)
    SOURCE.flat[span[0] + place] ^= 1
    assert found == wrong
    read.generations[-1] += 1
    assert copied(read, SOURCE) == STALE


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connected, and soon full."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for sock in (ours, theirs):
            sock.setblocking(False)
        yield ours, theirs


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_stream_goes_on_where_it_stopped_and_blocks_that_were_reused_have_no_tail(
    sockets: tuple[socket.socket, socket.socket], is_reused: bool
) -> None:
    ours, theirs = sockets
    layout = KvLayout.gqa(layers=4, heads=2, head_dim=64, block_size=16, dtype=KvDtype.FLOAT32)
    source, target = make_pool(layout, NUM_BLOCKS, seed=2), make_pool(layout, NUM_BLOCKS)
    read = read_of(source, target, layout, 0, 40)
    assert read is not None
    rows, head, tail = read.rows, b"the head", np.zeros(4, np.uint8)
    sent = received = steps = 0
    end = len(head) + read.num_bytes + len(tail)
    while sent >= 0 and received < end:
        sent = _native.send_blocks(
            ours.fileno(),
            head,
            source.flat,
            rows.block_bytes,
            read.source_ids,
            rows.rows,
            rows.last_rows,
            source.generations,
            read.generations,
            b"tail",
            sent,
        )
        if is_reused and steps == 0:
            source.bump(read.source_ids[:1])
        received = _native.receive_blocks(
            theirs.fileno(),
            head,
            target.flat,
            rows.block_bytes,
            read.destination_ids,
            rows.rows,
            rows.last_rows,
            tail,
            received,
        )
        steps += 1
    assert steps > 2
    assert sent == (STALE if is_reused else end)
    assert bytes(tail) == (bytes(4) if is_reused else b"tail")
    if not is_reused:
        assert read.find_wrong() == -1
    for pool in (source, target):
        pool.close()


def test_what_is_no_head_stays_in_the_socket(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    read = read_of(SOURCE, TARGET, SMALL, 0, 8)
    assert read is not None
    ours.send(b"another head")
    rows, tail = read.rows, np.zeros(4, np.uint8)
    call = (read.destination_ids, rows.rows, rows.last_rows, tail, 0)
    found = _native.receive_blocks(
        theirs.fileno(), b"the head", TARGET.flat, rows.block_bytes, *call
    )
    assert found == -1
    assert theirs.recv(99) == b"another head"


@pytest.mark.parametrize("bad", [[-1, 0], [0, NUM_BLOCKS]])
def test_ids_are_checked_before_a_byte_moves(bad: list[int]) -> None:
    read = read_of(SOURCE, TARGET, SMALL, 0, 8)
    assert read is not None
    TARGET.data[:] = 0
    for name in ("source_ids", "destination_ids"):
        with pytest.raises(ValueError, match="an id from 0 to 11"):
            copied(msgspec.structs.replace(read, **{name: bad}), SOURCE)
    assert not TARGET.data.any()


async def received(sock: socket.socket, num_bytes: int) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    while len(found) < num_bytes:
        part = await loop.sock_recv(sock, num_bytes - len(found))
        assert part
        found += part
    return found


@pytest.mark.parametrize("is_reused", [False, True])
async def test_an_answer_to_a_slow_puller_ends_with_what_is_true_then(
    sockets: tuple[socket.socket, socket.socket], is_reused: bool
) -> None:
    ours, theirs = sockets
    pool = make_pool(LARGE, 4, seed=3)
    exporter, _ = make_exporter(pool, LARGE)
    planner, access = planner_of(LARGE, pool), exporter.welcome().access
    assert planner is not None
    ticket = exporter.issue("r", 0, LARGE.block_size, [3])
    heads, size = LARGE.num_kv_heads, LARGE.block_bytes
    request = PullRequest(ticket, 0, LARGE.block_size, 0, LARGE.num_layers, 0, heads)
    answers = BlockAnswers(ours, access, exporter, planner, 5.0)
    serving = asyncio.create_task(answers.until_other(5.0))
    for _ in range(1 if is_reused else 2):
        theirs.send(frame_bytes(request))
        head = frame_bytes(PullVerdict(num_bytes=size))
        assert await received(theirs, len(head)) == head
        assert answers.is_busy
        if is_reused:
            pool.bump([3])
        assert await received(theirs, size) == pool.data[3].tobytes()
        said = await received(theirs, len(VALID))
        if is_reused:
            said += await received(theirs, int.from_bytes(said[4:8], "big") + 8 - len(said))
            verdict = first_frame(said, PullVerdict)
            assert verdict is not None
            assert verdict[0].code == "stale_ticket"
        else:
            assert said == VALID
    # A stale ticket is refused before a byte is sent: by the server, which finds the request.
    theirs.send(frame_bytes(request) if is_reused else b"another")
    await serving
    assert ours.recv(7).startswith(b"pdKV" if is_reused else b"another")
    statistics = exporter.statistics
    assert (statistics.stale, statistics.pulls_served) == ((1, 0) if is_reused else (0, 2))
    pool.close()


async def test_a_fault_of_the_exporter_ends_the_connection(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not met again and again, as the request can still be read."""
    ours, theirs = sockets
    exporter, _ = make_exporter(SOURCE, SMALL)
    planner, access = planner_of(SMALL, SOURCE), exporter.welcome().access
    assert planner is not None

    def fail(_sealed: bytes) -> Ticket:
        raise RuntimeError("a fault")

    monkeypatch.setattr(exporter, "open_ticket", fail)
    theirs.send(frame_bytes(PullRequest(b"t", 0, 4, 0, 2, 0, 2)))
    with pytest.raises(RuntimeError, match="a fault"):
        await BlockAnswers(ours, access, exporter, planner, 5.0).until_other(5.0)


async def test_a_connection_serves_few_blocks_and_many_and_none_in_any_order() -> None:
    """What waits for its socket changes each time."""
    layout = KvLayout.gqa(layers=2, heads=2, head_dim=64, block_size=16, dtype=KvDtype.FLOAT32)
    async with open_pair("tcp", layout, num_blocks=44) as pair:
        few, many, stale = (
            pair.exporter.issue("r", 0, len(blocks) * layout.block_size, blocks)
            for blocks in ([1], range(2, 42), [42])
        )
        pair.source.bump([42])
        for ticket in (few, few, many, few, stale, few, stale, many):
            pair.destination.data[:] = 0
            if ticket is stale:
                with pytest.raises(StaleTicket):
                    await pair.pull(ticket, range(40))
                continue
            await pair.pull(ticket, range(40))
            first = 1 if ticket is few else 2
            assert np.array_equal(pair.destination.data[0], pair.source.data[first])
        assert pair.exporter.statistics.broken == 0


async def test_a_socket_that_nobody_waits_for_does_not_wake_the_event_loop(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    watch = Watch(ours)
    for said in (b"one", b"two"):
        theirs.send(said)
        async with asyncio.timeout(30):
            await watch.ready()
    assert watch.is_watching
    async with asyncio.timeout(30):
        while watch.is_watching:  # as there is still something to read
            await asyncio.sleep(0)
    theirs.close()
    async with asyncio.timeout(30):
        await watch.ready()
    assert ours.recv(9) == b"onetwo"
    watch.stop()
    assert not watch.is_watching
