"""Pools with a part on another host of the node: what its agent does, and when it is lost."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import Decoder

from kv_transfer.exporter import Exporter, SpreadPool
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.hosts import conversation, far_host
from kv_transfer.hosts.agent import Agent
from kv_transfer.hosts.conversation import HostConversation
from kv_transfer.hosts.far_host import Exported, FarHost
from kv_transfer.hosts.messages import Answer
from kv_transfer.hosts.part_elsewhere import PartElsewhere
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.puller import Puller
from kv_transfer.sharded_pool import ShardedPool, parts_here
from kv_transfer.threads import wait_ended
from kv_transfer.tier import CpuCopies, FileBlocks, HostTier
from kv_transfer.transports.catalog import choose_kinds
from pdserve.kv import KvDtype, KvLayout, need
from pdserve.protocol import ExporterWelcome
from pdserve.shared.addresses import split_address
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import PeerLost, StaleTicket, TicketInvalid, TransferCancelled

MODEL = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=KvDtype.BFLOAT16)
WINDOWS = (None, 6, 6)  # so that checksums are of two groups of layers
IDENTITY = KvIdentity("a-model", "main", MODEL, windows=WINDOWS)
NUM_BLOCKS = 12
FIRST, END = 3, 22  # tokens, neither at a block's border
TABLE = [7, 4, 9, 0, 11, 6]  # request block |-> pool block
OTHER_TABLE = [3, 10, 5, 8, 1, 2]

_numbers = count()


@dataclass
class Wide:
    """A node, of one host or of two: `parts` are the memories of its parts, wherever they are."""

    layouts: list[KvLayout]
    pool: KvPool
    parts: list[np.ndarray]  # uint8[NUM_BLOCKS, block_bytes]
    exporter: Exporter
    puller: Puller
    hosts: list[FarHost]
    agents: list[asyncio.Task[None]]

    def fill(self, kv: np.ndarray) -> None:
        """Every part gets its layers and heads of it."""
        for layout, memory in zip(self.layouts, self.parts, strict=True):
            layers = slice(layout.first_layer, layout.end_layer)
            own = kv[:, layers, :, layout.first_kv_head : layout.end_kv_head]
            memory[:] = own.reshape(NUM_BLOCKS, -1)

    def tokens(self, part: int, table: Sequence[int]) -> np.ndarray:
        """[tokens, layers, 2, heads, bytes] of this part, from FIRST to END."""
        layout = self.layouts[part]
        blocks = self.parts[part][table].reshape(len(table), *layout.block_shape[:3], -1, 16)
        by_token = blocks.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *layout.block_shape[:3], 16)
        return by_token[FIRST:END]


@asynccontextmanager
async def wide(
    kind: str,
    *,
    num_hosts: int = 2,
    num_ranks: int = 2,
    num_stages: int = 1,
    tier_blocks: int = 0,
    answer_s: float = far_host.ANSWER_S,
) -> AsyncIterator[Wide]:
    """A node with a part on each host, if there are several; all hosts are this process."""
    layouts = MODEL.parts(num_ranks, num_stages) if num_hosts > 1 else [MODEL]
    identity = KvIdentity("a-model", "main", MODEL, num_stages, WINDOWS)
    here = [ExportedPool(NUM_BLOCKS, layout.block_bytes) for layout in layouts]

    def as_seen_by(host: int) -> ShardedPool:
        return ShardedPool(
            [
                part if n == host else PartElsewhere("cpu", NUM_BLOCKS, part.block_bytes)
                for n, part in enumerate(here)
            ]
        )

    pool: KvPool = as_seen_by(0) if num_hosts > 1 else here[0]
    clock, node_id = ManualClock(100.0), f"node-{next(_numbers)}"
    hosts = [FarHost(f"host {n}", here[n].block_bytes, answer_s) for n in range(1, len(here))]
    kinds = choose_kinds([kind], pool)
    exporter = Exporter(node_id, "life-1", identity, pool, clock, kinds, spread=SpreadPool(hosts))
    puller = Puller(pool, identity, host_id(), kinds, hosts=hosts)
    agents: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(exporter.close)
        stack.push_async_callback(puller.close)
        await exporter.start("127.0.0.1")
        exported = exported_by(node_id, [kind], identity, exporter.ticket_key)
        for number, host in enumerate(hosts, start=1):
            part = here[number]

            def make_tier(num_blocks: int, part: ExportedPool = part) -> list[CpuCopies]:
                return [CpuCopies(part, FileBlocks(num_blocks, [part.block_bytes], ""))]

            agent = Agent(as_seen_by(number), "127.0.0.1", "127.0.0.1", make_tier)
            sock, end = connected()
            agents.append(asyncio.create_task(agent.serve(end)))
            assert isinstance(pool, ShardedPool)
            exporter.offers += await host.begin(
                sock, exported, pool.generations, tier_blocks, clock
            )
            pool.follow_bumps(lambda ids, host=host: host.bumped(ids, pool.generations))
        yield Wide(layouts, pool, [p.data for p in here], exporter, puller, hosts, agents)
        for host in hosts:
            await host.close()
        ended = await asyncio.gather(*agents, return_exceptions=True)
        assert all(isinstance(end, PeerLost) for end in ended), ended


def connected() -> tuple[socket.socket, socket.socket]:
    """A connection of a node to an agent, and the agent's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def exported_by(
    node_id: str,
    transports: list[str],
    identity: KvIdentity = IDENTITY,
    ticket_key: bytes = bytes(32),
) -> Exported:
    return Exported(
        node_id=node_id,
        incarnation="life-1",
        identity=identity,
        ticket_key=ticket_key,
        transports=transports,
        kv_port=0,
        links=[],
    )


def pool_of_last_host() -> ShardedPool:
    """Of two hosts."""
    first, last = (layout.block_bytes for layout in MODEL.parts(2, 1))
    return ShardedPool([PartElsewhere("cpu", NUM_BLOCKS, first), ExportedPool(NUM_BLOCKS, last)])


async def admitted(node: Wide) -> ExporterWelcome:
    """As the session server admits a puller."""
    welcome = node.exporter.welcome()
    await node.exporter.introduce(welcome)
    return welcome


def random_kv() -> np.ndarray:
    shape = (NUM_BLOCKS, 3, 2, 2, MODEL.block_size, 16)
    return np.random.default_rng(5).integers(0, 256, shape, np.uint8)


async def check_pull(source: Wide, destination: Wide) -> None:
    """What arrives, in every part, is what is there; what was bumped is stale."""
    kv = random_kv()
    source.fill(kv)
    table = TABLE[FIRST // MODEL.block_size :]
    source.pool.bump(TABLE)
    ticket = source.exporter.issue("r", FIRST, END - FIRST, table)
    link = await destination.puller.connect(await admitted(source), 30.0)
    try:
        result = await destination.puller.pull(link, ticket, OTHER_TABLE, 0, 30.0)
        heads = sum(layout.num_kv_heads * layout.num_layers for layout in destination.layouts)
        assert result.bytes == heads * (END - FIRST) * 2 * 16
        for part, layout in enumerate(destination.layouts):
            blocks = kv[TABLE].transpose(0, 4, 1, 2, 3, 5).reshape(-1, 3, 2, 2, 16)[FIRST:END]
            layers = slice(layout.first_layer, layout.end_layer)
            expected = blocks[:, layers, :, layout.first_kv_head : layout.end_kv_head]
            assert (destination.tokens(part, OTHER_TABLE) == expected).all(), part
        pull = destination.puller.pull(link, ticket, OTHER_TABLE, 0, 30.0, num_tokens=END)
        begins = [need.window_block(END, window or END, 4) * 4 for window in WINDOWS]
        assert (await pull).bytes == sum(END - max(FIRST, begin) for begin in begins) * 2 * 2 * 16
        source.pool.bump(TABLE[2:3])
        with pytest.raises(StaleTicket):
            await destination.puller.pull(link, ticket, OTHER_TABLE, 0, 30.0)
    finally:
        await link.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("divided", [(2, 1), (1, 2)], ids=["ranks", "stages"])
async def test_kv_moves_to_and_from_all_hosts(kind: str, divided: tuple[int, int]) -> None:
    num_ranks, num_stages = divided
    two = partial(wide, kind, num_ranks=num_ranks, num_stages=num_stages)
    async with two() as node, wide(kind, num_hosts=1) as other, two() as third:
        await check_pull(node, other)
        await check_pull(other, node)
        await check_pull(node, third)


async def test_a_ticket_that_comes_before_its_generations_is_good() -> None:
    """The node's word of a bump may be slower than the puller to whom it has given the ticket."""
    async with wide("tcp") as node, wide("tcp", num_hosts=1) as other:
        (host,) = node.hosts
        host.bumped = lambda *_: None  # type: ignore[method-assign]  # it is under way
        await check_pull(node, other)


async def test_hosts_let_in_whom_the_node_lets_in() -> None:
    async with wide("tcp") as node, wide("tcp", num_hosts=1) as other:
        node.fill(random_kv())
        ticket = node.exporter.issue("r", 0, END, TABLE)

        async def pull(welcome: ExporterWelcome, sealed: bytes) -> None:
            link = await other.puller.connect(welcome, 30.0)
            try:
                await other.puller.pull(link, sealed, OTHER_TABLE, 0, 30.0)
            finally:
                await link.close()

        with pytest.raises(PeerLost):
            await pull(node.exporter.welcome(), ticket)  # of which the host has not been told
        welcome = await admitted(node)
        forged = ticket[:-1] + bytes([ticket[-1] ^ 1])
        with pytest.raises(TicketInvalid):
            await pull(welcome, forged)
        await pull(welcome, ticket)
        node.exporter.dismiss(welcome)
        with pytest.raises(PeerLost):
            await pull(welcome, ticket)


async def test_a_cancelled_pull_ends_when_the_host_has_ended_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, may_end, has_ended = asyncio.Event(), asyncio.Event(), False

    async def slow(*_: Any, **__: Any) -> None:
        nonlocal has_ended
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()  # as a thread that copies
            has_ended = True

    async with wide("tcp") as node, wide("tcp", num_hosts=1) as other:
        ticket = other.exporter.issue("r", 0, END, TABLE)
        link = await node.puller.connect(await admitted(other), 30.0)
        pull = Puller.pull
        monkeypatch.setattr(Puller, "pull", slow)
        pulling = asyncio.create_task(pull(node.puller, link, ticket, OTHER_TABLE, 0, 30.0))
        await began.wait()
        pulling.cancel()
        done, _ = await asyncio.wait({pulling}, timeout=0.05)
        assert not done, "something may still write to its blocks"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert has_ended
        await link.close()


async def test_a_call_that_is_cancelled_before_it_begins_is_answered() -> None:
    async with wide("tcp", tier_blocks=2) as node:
        (host,) = node.hosts
        storing = asyncio.create_task(host.store([1], [0]))
        await asyncio.sleep(0)  # it is said
        storing.cancel()
        with pytest.raises((asyncio.CancelledError, TransferCancelled)):
            await asyncio.wait_for(storing, 30)
        await host.store([1], [0])


async def test_a_lost_host_ends_what_is_asked_of_it() -> None:
    async with wide("tcp") as node, wide("tcp", num_hosts=1) as other:
        (host,), (agent,) = node.hosts, node.agents
        link = await node.puller.connect(await admitted(other), 30.0)
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        with pytest.raises(PeerLost):
            await node.exporter.introduce(node.exporter.welcome())
        assert host.lost
        ticket = other.exporter.issue("r", 0, END, TABLE)
        with pytest.raises(PeerLost):
            await node.puller.pull(link, ticket, OTHER_TABLE, 0, 30.0)
        node.pool.bump(TABLE)  # disturbs nobody
        await link.close()
        node.agents.clear()


async def test_a_host_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen one keeps its connections."""
    async with wide("tcp", answer_s=0.02) as node:
        (host,) = node.hosts
        monkeypatch.setattr(Agent, "_heed", lambda *_: None)
        asked = asyncio.create_task(admitted(node))
        await asyncio.wait({asked}, timeout=30.0)
        assert asked.done()
        with pytest.raises(PeerLost, match=r"host 1: it has not answered AdmitPuller"):
            await asked
        assert "Admit" in host.lost


def test_generations_that_do_not_come_end_the_host() -> None:
    agent = Agent(pool_of_last_host(), "127.0.0.1", "127.0.0.1", lambda _: [], bumps_s=0.01)
    timer = threading.Timer(30.0, agent.over)  # so that it does not hang where there is no deadline
    timer.start()
    with pytest.raises(PeerLost, match=r"has not said within 0\.01 s which blocks"):
        agent.wait_bumps(1)
    timer.cancel()


async def test_a_cancelled_connect_leaves_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host had connected, when it was told to stop."""
    has_connected, has_closed = asyncio.Event(), asyncio.Event()

    class Made:
        transport, reason = "tcp", ""

        async def close(self) -> None:
            has_closed.set()

    async def connect(*_: Any) -> Made:
        has_connected.set()
        return Made()

    async with wide("tcp") as node:
        (host,) = node.hosts
        monkeypatch.setattr(Puller, "connect", connect)
        connecting = asyncio.create_task(host.connect(node.exporter.welcome(), 30.0))
        await has_connected.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        async with asyncio.timeout(30):
            await has_closed.wait()


async def test_an_agent_that_is_cancelled_while_it_ends_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When a node dies, its connection for steps breaks just after that for KV."""
    began, is_cancelled, may_end, has_ended = (asyncio.Event() for _ in range(4))

    async def slow(*_: Any, **__: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
            await wait_ended(asyncio.ensure_future(may_end.wait()))  # as a thread that copies
            has_ended.set()

    async with wide("tcp") as node, wide("tcp", num_hosts=1) as other:
        (host,), (agent,) = node.hosts, node.agents
        ticket = other.exporter.issue("r", 0, END, TABLE)
        link = await node.puller.connect(await admitted(other), 30.0)
        offer = next(offer for offer in node.exporter.offers if offer.part)
        pull = Puller.pull
        monkeypatch.setattr(Puller, "pull", slow)
        pulling = asyncio.create_task(pull(node.puller, link, ticket, OTHER_TABLE, 0, 30.0))
        await began.wait()
        await host.close()
        await is_cancelled.wait()
        agent.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(agent, pulling, return_exceptions=True)
        assert has_ended.is_set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(split_address(offer.endpoint)).close()
        await link.close()
        node.agents.clear()


async def test_a_tier_that_is_being_made_is_closed_with_the_rest() -> None:
    pool = pool_of_last_host()
    (part,) = parts_here(pool).values()
    assert isinstance(part, ExportedPool)
    is_pinning, may_end, is_closed = (threading.Event() for _ in range(3))

    class Copies(CpuCopies):
        def close(self) -> None:
            is_closed.set()

    def make_tier(num_blocks: int) -> list[CpuCopies]:
        is_pinning.set()
        assert may_end.wait(30.0)
        return [Copies(part, FileBlocks(num_blocks, [part.block_bytes], ""))]

    agent = Agent(pool, "127.0.0.1", "127.0.0.1", make_tier)
    host = FarHost("host 1", part.block_bytes)
    sock, end = connected()
    serving = asyncio.create_task(agent.serve(end))
    beginning = asyncio.create_task(
        host.begin(sock, exported_by("node", ["tcp"]), part.generations, 2, ManualClock(1.0))
    )
    await asyncio.to_thread(is_pinning.wait, 30.0)
    await host.close()
    done, _ = await asyncio.wait({serving}, timeout=0.05)
    may_end.set()
    assert not done, "the thread still pins"
    ended = await asyncio.gather(serving, beginning, return_exceptions=True)
    assert all(isinstance(end, PeerLost) for end in ended), ended
    assert is_closed.is_set()


async def test_the_host_tier_has_slots_on_every_host() -> None:
    async with wide("tcp", tier_blocks=4) as node:
        assert isinstance(node.pool, ShardedPool)
        part = node.pool.parts[0]
        assert isinstance(part, ExportedPool)
        copies = CpuCopies(part, FileBlocks(4, [part.block_bytes], ""))
        tier = HostTier(4, [copies], node.hosts)
        assert tier.block_bytes == node.pool.block_bytes
        node.fill(random_kv())
        expected = [memory[[2, 5]].copy() for memory in node.parts]
        await tier.store([b"a", b"b"], [2, 5])
        for memory in node.parts:
            memory[:] = 0
        await tier.load([b"b", b"a"], [7, 1])
        for memory, kept in zip(node.parts, expected, strict=True):
            assert (memory[[1, 7]] == kept).all()
        tier.close()


async def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MOST_UNSENT", 4 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        one = HostConversation(here, Decoder(Answer))
        hearing = asyncio.create_task(one.hear())
        for _ in range(9):
            one.say(Answer(0, bytes(1 << 20)))
        with pytest.raises(PeerLost, match=r"it has not read \d MiB"):
            await hearing
        await one.close()
