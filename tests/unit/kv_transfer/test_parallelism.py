"""Pulls between nodes of unequal tensor parallelism, every rank with a pool of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.link import Link
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.spans.box import choose_shards
from kv_transfer.ticket import read_ticket
from kv_transfer.transports.catalog import choose_kinds
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import LayoutMismatch
from tests.matrix import matrix
from tests.unit.kv_transfer.pairs import make_pool, tokens_of

MODEL = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=KvDtype.BFLOAT16)
NUM_BLOCKS = 24
FIRST, END = 3, 45  # tokens, neither at a block's border
SOURCE_TABLE = [17, 4, 9, 0, 22, 11, 6, 13, 2, 20, 8, 15]  # request block |-> pool block
TABLE = [3, 12, 5, 19, 1, 10, 7, 14, 21, 16, 18, 23]


class Rank:
    """One rank of a node: its shard's layout, pool and ends of the transfer."""

    def __init__(self, rank: int, layout: KvLayout, kind: str, seed: int | None) -> None:
        self.layout = layout
        self.pool: ExportedPool = make_pool(layout, NUM_BLOCKS, seed)
        identity = KvIdentity("a-model", "main", layout)
        kinds = choose_kinds([kind], self.pool)
        clock = ManualClock(100.0)
        self.exporter = Exporter(
            "p0",
            f"life-{rank}",
            identity,
            self.pool,
            clock,
            kinds,
            tickets=TicketRules(with_checksums=True),
        )
        self.puller = Puller(self.pool, identity, host_id(), kinds)


@asynccontextmanager
async def node(
    kind: str, num_ranks: int, block_size: int, seed: int | None = None
) -> AsyncIterator[list[Rank]]:
    """The ranks of one node; exporters are started."""
    whole = replace(MODEL, block_size=block_size)
    ranks = [Rank(n, whole.shard(n, num_ranks), kind, seed) for n in range(num_ranks)]
    try:
        for rank in ranks:
            await rank.exporter.start("127.0.0.1")
        yield ranks
    finally:
        for rank in ranks:
            await rank.puller.close()
            await rank.exporter.close()
            rank.pool.close()


def same_kv_on_replicas(ranks: Sequence[Rank]) -> None:
    """What tensor parallelism sees to: who holds a head holds the same KV of it."""
    whole = make_pool(replace(MODEL, block_size=ranks[0].layout.block_size), NUM_BLOCKS, seed=5)
    layout = ranks[0].layout
    shape = (NUM_BLOCKS, MODEL.num_layers, 2, -1, layout.block_size * MODEL.head_dim * 2)
    heads = whole.data.reshape(shape)
    for rank in ranks:
        held = slice(rank.layout.first_kv_head, rank.layout.end_kv_head)
        rank.pool.data[:] = heads[:, :, :, held].reshape(NUM_BLOCKS, -1)
    whole.close()


async def pull_all(sources: Sequence[Rank], destination: Rank, rank: int, layers: range) -> int:
    """Pull a rank's heads of everybody who has some; how many pulls that took."""
    size = sources[0].layout.block_size
    blocks = SOURCE_TABLE[FIRST // size : -(-END // size)]
    chosen = choose_shards([source.layout for source in sources], destination.layout, rank)
    for index, heads in chosen:
        exporter = sources[index].exporter
        async with AsyncExitStack() as stack:
            link: Link = await destination.puller.connect(exporter.welcome(), timeout_s=30)
            stack.push_async_callback(link.close)
            ticket = exporter.issue("r", FIRST, END - FIRST, blocks, layers)
            assert read_ticket(ticket).checksums
            result = await destination.puller.pull(link, ticket, TABLE, 0, 5, heads)
            row_bytes = MODEL.head_dim * 2
            expected = (END - FIRST) * len(layers) * 2 * len(heads) * row_bytes
            assert result.bytes == expected
    return len(chosen)


def kv_of(rank: Rank, table: Sequence[int], begin: int, end: int) -> np.ndarray:
    """[end - begin, num_layers, 2, heads here, bytes], token by token."""
    return tokens_of(rank.pool, rank.layout, table, begin, end)


def oracle(sources: Sequence[Rank], destination: Rank) -> np.ndarray:
    """What has to arrive, head by head of anybody who has it."""
    heads = []
    for head in range(destination.layout.first_kv_head, destination.layout.end_kv_head):
        source = next(s for s in sources if s.layout.first_kv_head <= head < s.layout.end_kv_head)
        kv = kv_of(source, SOURCE_TABLE, FIRST, END)
        heads.append(kv[:, :, :, head - source.layout.first_kv_head])
    return np.stack(heads, axis=3)


@pytest.mark.parametrize(
    ("source_size", "destination_size"), matrix([(4, 4), (4, 6), (16, 4)], {(4, 6)})
)
@pytest.mark.parametrize(
    ("source_tp", "destination_tp"), [(1, 2), (1, 4), (2, 1), (4, 1), (2, 4), (4, 2), (4, 4)]
)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_unequal_tensor_parallelism(
    kind: str, source_tp: int, destination_tp: int, source_size: int, destination_size: int
) -> None:
    """2 KV heads, so that TP 2 splits them and TP 4 replicates them."""
    async with (
        node(kind, source_tp, source_size) as sources,
        node(kind, destination_tp, destination_size) as destinations,
    ):
        same_kv_on_replicas(sources)
        num_pulls = 0
        for number, destination in enumerate(destinations):
            num_pulls += await pull_all(sources, destination, number, range(MODEL.num_layers))
            arrived = kv_of(destination, TABLE, FIRST, END)
            np.testing.assert_array_equal(arrived, oracle(sources, destination))
            assert not kv_of(destination, TABLE, 0, FIRST).any()
            assert destination.puller.statistics.corrupt == 0
        # A rank pulls from as few others as its heads are spread over.
        assert num_pulls == (2 if destination_tp == 1 < source_tp else destination_tp)


async def test_layers_come_one_range_after_the_other() -> None:
    async with node("shm", 2, 4) as sources, node("shm", 1, 6) as (destination,):
        same_kv_on_replicas(sources)
        await pull_all(sources, destination, 0, range(2))
        arrived = kv_of(destination, TABLE, FIRST, END)
        expected = oracle(sources, destination)
        np.testing.assert_array_equal(arrived[:, :2], expected[:, :2])
        assert not arrived[:, 2:].any()
        await pull_all(sources, destination, 0, range(2, 3))
        np.testing.assert_array_equal(kv_of(destination, TABLE, FIRST, END), expected)


async def test_a_rank_without_our_heads_is_refused_when_we_meet() -> None:
    async with node("tcp", 2, 4) as sources, node("tcp", 2, 4) as destinations:
        with pytest.raises(LayoutMismatch, match="no KV head in common"):
            await destinations[1].puller.connect(sources[0].exporter.welcome(), timeout_s=30)
