"""What a pull does, whatever transport carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from kv_transfer import threads
from kv_transfer.spans import plan
from kv_transfer.transports import tcp
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import StaleIncarnation, StaleTicket, TicketInvalid, TransferCancelled
from tests.matrix import matrix
from tests.unit.kv_transfer.pairs import (
    BY_DEFAULT,
    LARGE,
    SMALL,
    TRANSPORTS,
    Pair,
    open_pair,
    tokens_of,
)


@pytest.fixture(
    params=[
        *BY_DEFAULT,
        *matrix(["tcp over two streams", "shm in threads", "tcp in threads"], 1),
    ]
)
async def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    kind, _, way = request.param.partition(" ")  # blocks as small as here would be moved
    if way == "in threads":  # on the event loop
        monkeypatch.setattr(threads, "INLINE_BYTES", -1)
    elif way:  # over one connection
        monkeypatch.setattr(tcp, "_STREAMED_BYTES", 0)
    async with open_pair(kind) as opened:
        yield opened


async def test_whole_blocks_arrive_and_nothing_else_changes(pair: Pair) -> None:
    ticket = pair.exporter.issue("r", 0, 12, [5, 9, 2])
    result = await pair.pull(ticket, [7, 3, 8])
    assert result.bytes == 3 * SMALL.block_bytes
    assert result.seconds > 0
    np.testing.assert_array_equal(pair.destination.data[[7, 3, 8]], pair.source.data[[5, 9, 2]])
    untouched = [block for block in range(32) if block not in (7, 3, 8)]
    assert not pair.destination.data[untouched].any()


async def test_a_partial_last_block_leaves_its_free_slots_alone(pair: Pair) -> None:
    pair.destination.data[:] = 0xEE
    ticket = pair.exporter.issue("r", 0, 6, [5, 9])
    result = await pair.pull(ticket, [7, 3])
    assert result.bytes == 6 * SMALL.token_bytes
    received = tokens_of(pair.destination, SMALL, [7, 3], 0, 8)
    np.testing.assert_array_equal(received[:6], tokens_of(pair.source, SMALL, [5, 9], 0, 6))
    assert (received[6:] == 0xEE).all()


async def test_chunks_of_a_running_prefill_make_up_the_whole(pair: Pair) -> None:
    source_table, table = [4, 11, 6, 1], [20, 21, 22, 23]
    for first, end in ((0, 5), (5, 7), (7, 13), (13, 15)):
        blocks = source_table[first // 4 : -(-end // 4)]
        await pair.pull(pair.exporter.issue("r", first, end - first, blocks), table)
    received = tokens_of(pair.destination, SMALL, table, 0, 15)
    np.testing.assert_array_equal(received, tokens_of(pair.source, SMALL, source_table, 0, 15))
    assert pair.puller.statistics.pulls == 4


async def test_from_token_skips_the_prefix_we_hold(pair: Pair) -> None:
    ticket = pair.exporter.issue("r", 4, 10, [5, 9, 2])
    pair.source.bump([5])  # wholly within the skipped prefix: its fate does not matter
    result = await pair.pull(ticket, [7, 3, 8, 9], from_token=9)
    assert result.bytes == 5 * SMALL.token_bytes
    received = tokens_of(pair.destination, SMALL, [7, 3, 8, 9], 0, 16)
    expected = tokens_of(pair.source, SMALL, [0, 5, 9, 2], 9, 14)
    np.testing.assert_array_equal(received[9:14], expected)
    assert not received[:9].any()


async def test_nothing_is_pulled_when_we_hold_it_all(pair: Pair) -> None:
    ticket = pair.exporter.issue("r", 0, 4, [5])
    result = await pair.pull(ticket, [7], from_token=4)
    assert result.bytes == 0


async def test_a_block_freed_before_the_pull_is_stale(pair: Pair) -> None:
    ticket = pair.exporter.issue("r", 0, 12, [5, 9, 2])
    pair.source.bump([9])
    with pytest.raises(StaleTicket, match=r"block 9 has generation 1, the ticket is for 0"):
        await pair.pull(ticket, [7, 3, 8])
    assert pair.puller.statistics.stale == 1
    # A fresh ticket for the same block is fine, also on the same connection.
    await pair.pull(pair.exporter.issue("r", 0, 12, [5, 9, 2]), [7, 3, 8])


async def test_a_ticket_of_another_exporter_is_refused(pair: Pair) -> None:
    async with open_pair("fake") as other:
        other.exporter.node_id = "p1"
        with pytest.raises(TicketInvalid, match="'p1'"):
            await pair.pull(other.exporter.issue("r", 0, 4, [5]), [7])


async def test_a_ticket_of_a_former_life_is_refused(pair: Pair) -> None:
    pair.exporter.incarnation = "life-0"
    with pytest.raises(StaleIncarnation, match=r"'life-0'.*'life-1'"):
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])
    assert pair.puller.statistics.failed == 1


@pytest.mark.parametrize("table", [[7, 99], [7, -1]])
async def test_a_block_table_of_blocks_that_we_do_not_have(pair: Pair, table: list[int]) -> None:
    with pytest.raises(ValueError, match="block"):
        await pair.pull(pair.exporter.issue("r", 0, 8, [5, 6]), table)


@pytest.mark.parametrize("table", [[], [7]])
async def test_a_ticket_for_more_than_the_block_table_holds(pair: Pair, table: list[int]) -> None:
    """Its tokens are the exporter's word, and no reason to fail otherwise than it can."""
    with pytest.raises(TicketInvalid, match="up to 8, the block table for"):
        await pair.pull(pair.exporter.issue("r", 0, 8, [5, 6]), table)
    assert pair.puller.statistics.failed == 1


@pytest.mark.parametrize("heads", [range(3), range(1, 3), range(-1, 1)])
async def test_heads_that_are_not_there(pair: Pair, heads: range) -> None:
    ticket = pair.exporter.issue("r", 0, 4, [5])
    with pytest.raises(ValueError, match="KV heads"):
        await pair.puller.pull(pair.link, ticket, [7], 0, 5, heads)


async def test_a_ticket_for_some_layers_leaves_the_others_alone(pair: Pair) -> None:
    ticket = pair.exporter.issue("r", 0, 6, [5, 9], range(1, 2))
    result = await pair.pull(ticket, [7, 3])
    assert result.bytes == 6 * SMALL.token_bytes // 2
    received = tokens_of(pair.destination, SMALL, [7, 3], 0, 6)
    expected = tokens_of(pair.source, SMALL, [5, 9], 0, 6)
    np.testing.assert_array_equal(received[:, 1], expected[:, 1])
    assert not received[:, 0].any()


async def test_many_pulls_share_one_link(pair: Pair) -> None:
    tickets = [pair.exporter.issue(f"r{i}", 0, 4, [i]) for i in range(30)]
    await asyncio.gather(*(pair.pull(ticket, [i]) for i, ticket in enumerate(tickets)))
    np.testing.assert_array_equal(pair.destination.data[:30], pair.source.data[:30])
    assert pair.puller.statistics.pulls == 30
    assert pair.puller.statistics.bytes == 30 * SMALL.block_bytes


async def test_a_closed_link_pulls_no_more(pair: Pair) -> None:
    await pair.link.close()
    with pytest.raises(TransferCancelled):
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])
    assert pair.puller.statistics.cancelled == 1


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize(("source_size", "destination_size"), [(4, 16), (16, 4), (6, 4)])
async def test_unequal_block_sizes(kind: str, source_size: int, destination_size: int) -> None:
    def sized(block_size: int) -> KvLayout:
        return KvLayout(2, 3, 8, block_size, KvDtype.BFLOAT16)

    source, destination = sized(source_size), sized(destination_size)
    first, end = 3, 45
    source_table = list(range(20, 20 - source.blocks_for(end), -1))
    table = list(range(1, 1 + destination.blocks_for(end)))
    async with open_pair(kind, source, destination) as pair:
        blocks = source_table[first // source_size :]
        await pair.pull(pair.exporter.issue("r", first, end - first, blocks), table)
        received = tokens_of(pair.destination, destination, table, first, end)
        expected = tokens_of(pair.source, source, source_table, first, end)
        np.testing.assert_array_equal(received, expected)
        assert not tokens_of(pair.destination, destination, table, 0, first).any()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_pull_of_many_rows_is_several_reads(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_PART_ROWS", 32)
    wider = msgspec.structs.replace(SMALL, block_size=6)
    async with open_pair(kind, SMALL, wider) as pair:
        ticket = pair.exporter.issue("r", 2, 37, list(range(3, 13)))
        result = await pair.pull(ticket, [9, 4, 7, 1, 2, 8, 5], from_token=3)
        assert result.bytes == 36 * SMALL.token_bytes
        received = tokens_of(pair.destination, wider, [9, 4, 7, 1, 2, 8, 5], 3, 39)
        expected = tokens_of(pair.source, SMALL, list(range(3, 13)), 3, 39)
        np.testing.assert_array_equal(received, expected)
        if kind == "tcp":
            assert pair.exporter.statistics.pulls_served == 4


async def test_a_large_pull_over_tcp_takes_two_connections() -> None:
    async with open_pair("tcp", LARGE, num_blocks=16) as pair:
        served = pair.exporter.statistics
        await pair.pull(pair.exporter.issue("r", 0, 15 * 64, list(range(15))), list(range(15)))
        assert served.pulls_served == 1
        backwards = list(range(15, -1, -1))
        await pair.pull(pair.exporter.issue("r", 0, 16 * 64, list(range(16))), backwards)
        assert served.pulls_served == 3
        np.testing.assert_array_equal(pair.destination.data[::-1], pair.source.data)


async def test_a_block_freed_during_one_half_of_a_pull_ends_both() -> None:
    async with open_pair("tcp", LARGE, num_blocks=16) as pair:
        ticket = pair.exporter.issue("r", 0, 16 * 64, list(range(16)))
        pair.source.bump([15])
        with pytest.raises(StaleTicket, match="block 15 has generation 1"):
            await pair.pull(ticket, list(range(16)))
        kept = pair.destination.data.copy()
        pair.source.data[:] = 0
        await asyncio.sleep(0.02)
        np.testing.assert_array_equal(pair.destination.data, kept)
