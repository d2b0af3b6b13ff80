"""Pulls between nodes of which at least one has a pool in several parts, as ranks on GPUs have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.sharded_link import AnyLink, ShardedLink, part_welcomes
from kv_transfer.memory import KvPool
from kv_transfer.puller import Puller
from kv_transfer.sharded_pool import ShardedPool
from kv_transfer.transports.catalog import PORTS_OF_A_PART, TransportKind, choose_kinds
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import TransportOffer
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError, PeerLost, StaleTicket, TransferCancelled
from tests.fakes.gpus import FakeHost
from tests.matrix import matrix
from tests.unit.kv_transfer.gpu_pairs import CUDA_IPC, DeviceBlocks, nccl, until
from tests.unit.kv_transfer.pairs import make_pool

MODEL = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=KvDtype.BFLOAT16)
NUM_BLOCKS = 24
FIRST, END = 3, 45  # tokens, neither at a block's border
SOURCE_TABLE = [17, 4, 9, 0, 22, 11, 6, 13, 2, 20, 8, 15]  # request block |-> pool block
TABLE = [3, 12, 5, 19, 1, 10, 7, 14, 21, 16, 18, 23]


def whole_kv(block_size: int, seed: int = 5) -> np.ndarray:
    """[NUM_BLOCKS, layers, 2, heads, block_size, bytes of a token's head] of random bytes."""
    shape = (NUM_BLOCKS, MODEL.num_layers, 2, MODEL.num_kv_heads, block_size, MODEL.head_dim * 2)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@dataclass
class Node:
    """Its parts' memory is [NUM_BLOCKS, block_bytes] each."""

    layout: KvLayout
    layouts: list[KvLayout]  # of the parts
    pool: KvPool
    parts: list[np.ndarray]
    exporter: Exporter
    puller: Puller

    def fill(self, kv: np.ndarray) -> None:
        """Every part gets its layers and heads of it."""
        for layout, memory in zip(self.layouts, self.parts, strict=True):
            layers = slice(layout.first_layer, layout.end_layer)
            own = kv[:, layers, :, layout.first_kv_head : layout.end_kv_head]
            memory[:] = own.reshape(NUM_BLOCKS, -1)

    def tokens(self, part: int, table: Sequence[int], begin: int, end: int) -> np.ndarray:
        """[end - begin, layers, 2, heads, bytes], of this part."""
        layout = self.layouts[part]
        blocks = self.parts[part][table].reshape(len(table), *layout.block_shape[:3], -1, 16)
        by_token = blocks.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *layout.block_shape[:3], 16)
        return by_token[begin:end]


@asynccontextmanager
async def node(
    num_ranks: int,
    block_size: int,
    kinds: Sequence[TransportKind] = (),
    host: FakeHost | None = None,
    *,
    num_stages: int = 1,
    first_gpu: int = 0,
    port: int = 0,
) -> AsyncIterator[Node]:
    """A node of ranks whose pools are in CPU memory, or on GPUs in a row of a pretended host.

    There are as many in each stage.
    """
    layout = replace(MODEL, block_size=block_size)
    layouts = layout.parts(num_ranks, num_stages)
    parts: list[KvPool] = []
    memories = []
    for number, each in enumerate(layouts):
        if host is None:
            own = make_pool(each, NUM_BLOCKS)
            parts.append(own)
            memories.append(own.data)
        else:
            blocks = DeviceBlocks(host.driver(first_gpu + number), each, NUM_BLOCKS, host)
            parts.append(blocks.pool)
            memories.append(blocks.data)
    pool = ShardedPool(parts) if len(parts) > 1 else parts[0]
    identity = KvIdentity("a-model", "main", layout, num_stages)
    exporter = Exporter("p0", f"life-{num_ranks}", identity, pool, ManualClock(100.0), kinds)
    puller = Puller(pool, identity, host_id(), kinds)
    try:
        await exporter.start("127.0.0.1", port=port)
        yield Node(layout, layouts, pool, memories, exporter, puller)
    finally:
        await puller.close()
        await exporter.close()
        pool.close()


@asynccontextmanager
async def linked(source: Node, destination: Node) -> AsyncIterator[AnyLink]:
    link = await destination.puller.connect(source.exporter.welcome(), timeout_s=30)
    try:
        yield link
    finally:
        await link.close()


async def pull(source: Node, destination: Node, layers: range, kv: np.ndarray) -> None:
    """Pull a request's tokens, and look at every part."""
    size = source.layout.block_size
    blocks = SOURCE_TABLE[FIRST // size : -(-END // size)]
    async with linked(source, destination) as link:
        ticket = source.exporter.issue("r", FIRST, END - FIRST, blocks, layers)
        result = await destination.puller.pull(link, ticket, TABLE, 0, 30)
    by_token = kv[SOURCE_TABLE].transpose(0, 4, 1, 2, 3, 5)
    expected = by_token.reshape(-1, MODEL.num_layers, 2, MODEL.num_kv_heads, 16)[FIRST:END]
    moved = 0
    for part, layout in enumerate(destination.layouts):
        heads = slice(layout.first_kv_head, layout.end_kv_head)
        own = [n for n in layers if layout.first_layer <= n < layout.end_layer]
        arrived = destination.tokens(part, TABLE, FIRST, END)
        arrived = arrived[:, [layer - layout.first_layer for layer in own]]
        np.testing.assert_array_equal(arrived, expected[:, own, :, heads])
        assert not destination.tokens(part, TABLE, 0, FIRST).any()
        moved += arrived.nbytes
    assert result.bytes == moved


PAIRS = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2), (4, 4)]


@pytest.mark.parametrize(("source_size", "destination_size"), matrix([(4, 4), (4, 6), (16, 4)], 1))
@pytest.mark.parametrize(("source_tp", "destination_tp"), PAIRS)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_nodes_of_any_number_of_parts(
    kind: str, source_tp: int, destination_tp: int, source_size: int, destination_size: int
) -> None:
    """2 KV heads, so that 2 parts have one each and 4 parts are two times two replicas."""
    pool = make_pool(MODEL, 1)
    kinds = choose_kinds([kind], pool)
    pool.close()
    async with (
        node(source_tp, source_size, kinds) as source,
        node(destination_tp, destination_size, kinds) as destination,
    ):
        kv = whole_kv(source_size)
        source.fill(kv)
        await pull(source, destination, range(MODEL.num_layers), kv)


STAGED = [((1, 1), (2, 2)), ((2, 2), (1, 1)), ((1, 3), (2, 2)), ((2, 2), (4, 2)), ((4, 1), (1, 3))]


@pytest.mark.parametrize(("source_size", "destination_size"), matrix([(4, 4), (4, 6)], 1))
@pytest.mark.parametrize(("of_source", "of_destination"), STAGED, ids=str)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_nodes_of_any_number_of_stages(
    kind: str,
    of_source: tuple[int, int],
    of_destination: tuple[int, int],
    source_size: int,
    destination_size: int,
) -> None:
    """Ranks and stages; 3 layers, so that of 2 stages one has 1 and the other 2."""
    pool = make_pool(MODEL, 1)
    kinds = choose_kinds([kind], pool)
    pool.close()
    async with (
        node(of_source[0], source_size, kinds, num_stages=of_source[1]) as source,
        node(of_destination[0], destination_size, kinds, num_stages=of_destination[1]) as other,
    ):
        kv = whole_kv(source_size)
        source.fill(kv)
        await pull(source, other, range(2), kv)
        await pull(source, other, range(2, 3), kv)
        await pull(source, other, range(3), kv)


async def test_builds_without_stages_see_that_they_do_not_know_the_parts() -> None:
    """They took parts 0 to n - 1 for ranks, which have heads of all layers."""
    kinds = choose_kinds(["tcp"], make_pool(MODEL, 1))
    async with node(2, 4, kinds, num_stages=2) as source:
        assert [offer.part for offer in source.exporter.offers] == [0, 1, 64, 65]


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("kind", [CUDA_IPC, nccl()], ids=lambda kind: kind.name)
async def test_parts_on_gpus(kind: TransportKind, source_tp: int, destination_tp: int) -> None:
    host = FakeHost()
    async with (
        node(source_tp, 4, [kind], host) as source,
        node(destination_tp, 4, [kind], host, first_gpu=4) as destination,
    ):
        kv = whole_kv(4)
        source.fill(kv)
        await pull(source, destination, range(MODEL.num_layers), kv)
        num_links = max(destination_tp, min(source_tp, MODEL.num_kv_heads))
        async with linked(source, destination) as link:
            assert isinstance(link, ShardedLink)
            assert (len(link.strands), link.transport) == (num_links, kind.name)
    assert (host.num_lanes, host.num_opened) == (0, 0)


async def test_layers_come_one_range_after_the_other() -> None:
    kinds = choose_kinds(["tcp"], make_pool(MODEL, 1))
    async with node(2, 4, kinds) as source, node(4, 6, kinds) as destination:
        kv = whole_kv(4)
        source.fill(kv)
        await pull(source, destination, range(2), kv)
        assert not destination.tokens(3, TABLE, FIRST, END)[:, 2:].any()
        await pull(source, destination, range(2, 3), kv)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_block_that_is_used_again_is_stale_in_every_part(kind: str) -> None:
    kinds = choose_kinds([kind], make_pool(MODEL, 1))
    async with node(2, 4, kinds) as source, node(2, 4, kinds) as destination:
        ticket = source.exporter.issue("r", 0, 8, [3, 5])
        source.pool.bump([5])
        async with linked(source, destination) as link:
            with pytest.raises(StaleTicket):
                await destination.puller.pull(link, ticket, [7, 9], 0, 30)


async def test_a_part_that_fails_fails_the_pull_when_the_others_have_ended() -> None:
    """One part's generations alone have changed, as no node does."""
    kinds = choose_kinds(["shm"], make_pool(MODEL, 1))
    async with node(2, 4, kinds) as source, node(1, 4, kinds) as destination:
        ticket = source.exporter.issue("r", 0, 8, [3, 5])
        assert isinstance(source.pool, ShardedPool)
        source.pool.parts[1].bump([5])
        async with linked(source, destination) as link:
            with pytest.raises(StaleTicket):
                await destination.puller.pull(link, ticket, [7, 9], 0, 30)
            destination.parts[0][:] = 0xEE
            await asyncio.sleep(0.02)
            assert (destination.parts[0] == 0xEE).all(), "nothing is written any more"


async def test_closing_the_link_ends_the_copies_of_all_parts() -> None:
    host = FakeHost()
    async with (
        node(2, 4, [CUDA_IPC], host) as source,
        node(2, 4, [CUDA_IPC], host) as destination,
        linked(source, destination) as link,
    ):
        source.fill(whole_kv(4))
        host.let(copies=False)
        ticket = source.exporter.issue("r", 0, 8, [3, 5])
        pulling = asyncio.create_task(destination.puller.pull(link, ticket, [7, 9], 0, 60))
        await until(lambda: all(part[7].any() for part in destination.parts))
        closing = asyncio.create_task(link.close())
        await asyncio.sleep(0.02)
        assert not pulling.done(), "the GPUs still copy"
        host.let(copies=True)
        with pytest.raises(TransferCancelled):
            await pulling
        await closing
    assert (host.num_lanes, host.num_opened) == (0, 0)


async def test_every_part_has_ports_of_its_own() -> None:
    kinds = choose_kinds(["tcp"], make_pool(MODEL, 1))
    with ExitStack() as closing:
        port = reserved_ports(closing, PORTS_OF_A_PART)
        async with node(2, 4, kinds, port=port) as source:
            ports = [int(offer.endpoint.rpartition(":")[2]) for offer in source.exporter.offers]
            assert ports == [port, port + PORTS_OF_A_PART]


def reserved_ports(closing: ExitStack, apart: int) -> int:
    """The first of two ports that no other process is given."""
    while True:
        first = ReservedPort("127.0.0.1")
        closing.callback(first.close)
        try:
            closing.callback(ReservedPort("127.0.0.1", first.port + apart).close)
        except ConfigError:  # somebody has it
            continue
        return first.port


async def test_parts_that_cannot_be_are_refused() -> None:
    kinds = choose_kinds(["tcp"], make_pool(MODEL, 1))
    async with node(1, 4, kinds) as source:
        welcome = source.exporter.welcome()
        for numbers in ([0, 2], [1], [-1, 0], list(range(65)), [0, 1, 64], [0, 128], [0, 64 * 64]):
            offers = [TransportOffer(name="tcp", part=number) for number in numbers]
            with pytest.raises(PeerLost, match="offers parts"):
                part_welcomes(replace(welcome, offers=offers))
