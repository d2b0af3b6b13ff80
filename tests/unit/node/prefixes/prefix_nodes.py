"""Nodes that give prefixes to each other, in one process: real sessions, a real transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.pinned import PinnedHostBlocks
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.store.blobs import Blobs
from kv_transfer.tier import FileBlocks
from kv_transfer.transports.catalog import KINDS
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.kv import KvDtype, KvLayout
from pdserve.measured.perf_model import PerfModel
from pdserve.node.prefixes.cost import PrefixWorth, PullCosts
from pdserve.node.prefixes.exports import PrefixExports
from pdserve.node.prefixes.fetch import PrefixFetcher
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier, TierBlocks, make_tier
from pdserve.node.prefixes.offers import FetchParts, Prefix, PrefixOffers
from pdserve.node.prefixes.store.node_store import NodeStore
from pdserve.node.prefixes.store.upkeep import Limits
from pdserve.node.sessions.client import Sessions
from pdserve.node.sessions.server import SessionServer
from pdserve.protocol import NodeAddress, PrefixSource, Prompt, StepCosts
from pdserve.settings.prefixes import PrefixPull
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.clock import SystemClock
from pdserve.shared.introduction import introduce
from pdserve.wire import session_pb2_grpc
from pdserve.wire.channel import Server
from tests.fakes.gpus import FakeHost
from tests.unit.kv_transfer.gpu_pairs import CUDA_IPC, DeviceBlocks
from tests.waits import until

TIMEOUTS = Timeouts(connect_s=1.0, liveness_s=2.0)
PREFIX_S = 5.0
NUM_BLOCKS = 72
BLOCK = 4
PROMPT = list(range(100, 151))  # twelve full blocks of four, and three tokens


def steps_take(node: PrefixNode, seconds: float) -> None:
    """Every step that the node may compute, however large."""
    node.parts.pull_costs.perf.costs = StepCosts(knot_tokens=[1], knot_s=[seconds])


def make_layout(block_size: int = BLOCK) -> KvLayout:
    return KvLayout(
        num_layers=2, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=KvDtype.FLOAT32
    )


def made_fetcher(parts: FetchParts, pull: PrefixPull, timeout_s: float) -> PrefixFetcher:
    """As `pdserve.node.assembly` makes it."""
    offers = PrefixOffers(parts.pool, parts.sessions, parts.tier, pull, parts.store)
    return PrefixFetcher(parts, offers, timeout_s, longest_s=max(TIMEOUTS.hold_s, timeout_s))


class PrefixNode:
    """What of a node has to do with prefixes."""

    def __init__(
        self,
        name: str,
        block_size: int = BLOCK,
        *,
        pull: PrefixPull = "always",
        tier_blocks: int = 0,
        timeout_s: float = PREFIX_S,
        timeouts: Timeouts = TIMEOUTS,
        gpus: FakeHost | None = None,
        blobs: Blobs | None = None,
        store_bytes: int = 0,
        state_blocks: int = 0,
        revision: str = "r",
    ) -> None:
        """With `gpus`, the pool is on the first of them; with `blobs`, there is a store."""
        self.name = name
        self.layout = make_layout(block_size)
        identity = KvIdentity("m", revision, self.layout)
        clock = SystemClock()
        self.gpus = gpus
        self.memory: ExportedPool | DevicePool
        if gpus is None:
            self.memory = ExportedPool(NUM_BLOCKS, self.layout.block_bytes)
            self.data = self.memory.data
            kinds = [kind for kind in KINDS if kind.name in ("shm", "tcp")]
        else:
            blocks = DeviceBlocks(gpus.driver(), self.layout, NUM_BLOCKS, gpus)
            self.memory, self.data, kinds = blocks.pool, blocks.data, [CUDA_IPC]
        self.pool = BlockPool(
            NUM_BLOCKS,
            block_size,
            bump_generations=self.memory.bump,
            state_blocks=state_blocks,
        )
        self.exporter = Exporter(
            name,
            f"{name}-1",
            identity,
            self.memory,
            clock,
            kinds,
            tickets=TicketRules(with_checksums=gpus is None),
        )
        self.puller = Puller(self.memory, identity, host_id(), kinds)
        self.tier = self._make_tier(tier_blocks)
        self.num_spoken_for = 0
        self.headroom = Headroom(self.pool, lambda: self.num_spoken_for)
        self.exports = PrefixExports(self.pool, self.exporter, self.tier, self.headroom, timeouts)
        self.server = Server(TIMEOUTS.liveness_s)
        servicer = SessionServer(self.exporter, None, clock, TIMEOUTS.connect_s, self.exports)
        session_pb2_grpc.add_KvSessionServicer_to_server(servicer, self.server.grpc)
        self.sessions = Sessions(name, f"{name}-1", identity, self.puller, clock, TIMEOUTS)
        costs = PullCosts(PerfModel(), token_budget=512)
        self.store: NodeStore | None = None
        if blobs is not None and self.tier is not None:
            worth = PrefixWorth(costs, self.layout, clock, pull)
            kind = identity.fingerprint
            self.store = NodeStore(blobs, self.tier, self.pool, kind, worth, Limits(store_bytes, 0))
        self.parts = FetchParts(
            pool=self.pool,
            identity=identity,
            puller=self.puller,
            sessions=self.sessions,
            tier=self.tier,
            pull_costs=costs,
            clock=clock,
            headroom=self.headroom,
            store=self.store,
        )
        self.fetcher = made_fetcher(self.parts, pull, timeout_s)
        self.port = 0

    def _make_tier(self, num_blocks: int) -> NodeTier | None:
        if num_blocks == 0:
            return None
        block_bytes = self.layout.block_bytes
        blocks: TierBlocks
        if self.gpus is None:
            blocks = FileBlocks(num_blocks, [block_bytes], "")
        else:
            blocks = PinnedHostBlocks(num_blocks, [block_bytes], self.gpus.driver())
        return make_tier(blocks, self.memory, self.pool)

    async def start(self) -> None:
        await self.exporter.start("127.0.0.1")
        self.port = await self.server.start("127.0.0.1", 0)
        if self.tier is not None:
            self.tier.start()
        if self.store is not None:
            self.store.start()

    async def close(self) -> None:
        await self.sessions.close()
        await self.server.stop(0)
        await self.exports.close()
        if self.store is not None:
            await self.store.close()
        if self.tier is not None:
            await self.tier.close()
        await self.exporter.close()
        await self.puller.close()
        self.memory.close()

    # ---- prompts -------------------------------------------------------------------------------

    def prefix(self, token_ids: Sequence[int] = PROMPT, salt: str = "") -> Prefix:
        usable = (len(token_ids) - 1) // self.layout.block_size
        prompt = Prompt(list(token_ids), cache_salt=salt)
        return Prefix(prompt, prompt.hashes(self.layout.block_size)[:usable])

    def compute(self, token_ids: Sequence[int], seed: int = 1, salt: str = "") -> None:
        """As if a prompt had run here: its full blocks are cached, with content by position."""
        prompt = Prompt(list(token_ids), cache_salt=salt)
        hashes = prompt.hashes(self.layout.block_size)
        table = self.pool.take_prefix(hashes)
        table += self.pool.allocate(len(hashes) - len(table))
        for index, block_id in enumerate(table):
            self.data[block_id] = self.content(index, seed).reshape(-1)
            self.pool.publish(block_id, hashes[index], prompt.owner)
        self.pool.release(table)

    def keep_state(self, token_ids: Sequence[int]) -> None:
        """As if the state behind these tokens, which fill blocks that are cached, had been kept."""
        assert self.pool.snapshots is not None
        prompt = Prompt(list(token_ids))
        block_ids = self.pool.allocate(self.pool.state_blocks)
        self.data[block_ids] = _state(self.pool.state_blocks, len(token_ids))
        last = prompt.hashes(self.layout.block_size)[-1]
        self.pool.snapshots.publish(block_ids, last, len(token_ids), prompt.owner)
        self.pool.release(block_ids)

    def num_usable_tokens(self) -> int:
        """How many of the prompt's cached tokens a request can go on behind, all looked at."""
        assert self.pool.snapshots is not None
        self.num_cached_tokens()
        usable = self.pool.usable(self.prefix().hashes)
        num_tokens = len(usable) * self.layout.block_size
        if usable:
            found = self.data[self.pool.snapshots.blocks(usable[-1])]
            assert (found == _state(self.pool.state_blocks, num_tokens)).all()
        return num_tokens

    def content(self, index: int, seed: int = 1) -> NDArray[np.uint8]:
        """Of the block with this number in a prompt, the same for every block size.

        [num_layers, 2, num_kv_heads, block_size, bytes of head_dim]
        """
        size = self.layout.block_size
        tokens = [
            np.random.default_rng([seed, token]).integers(0, 256, (2, 2, 2, 32), dtype=np.uint8)
            for token in range(index * size, (index + 1) * size)
        ]
        return np.stack(tokens, axis=3)

    def num_cached_tokens(self, token_ids: Sequence[int] = PROMPT, seed: int = 1) -> int:
        """The prompt's cached tokens, the content of which is looked at."""
        block_ids = self.pool.match_prefix(Prompt(token_ids).hashes(self.layout.block_size))
        for index, block_id in enumerate(block_ids):
            expected = self.content(index, seed).reshape(-1)
            assert (self.data[block_id] == expected).all(), f"block {index} of the prompt"
        return len(block_ids) * self.layout.block_size

    def flood(self) -> None:
        """Use every block for something else, so that nothing stays cached."""
        blocks = self.pool.allocate(self.pool.num_free)
        self.data[blocks] = 0
        self.pool.release(blocks)

    # ---- as seen by others ---------------------------------------------------------------------

    def source_for(self, puller: PrefixNode, num_tokens: int) -> PrefixSource:
        """A hint at this node, as a coordinator gives it."""
        introduction = introduce(
            self.exporter.introduction_key, self.exporter.incarnation, f"{puller.name}-1"
        )
        address = NodeAddress(
            node_id=self.name,
            incarnation=self.exporter.incarnation,
            session_address=f"127.0.0.1:{self.port}",
            introduction=introduction,
        )
        return PrefixSource(node=address, num_tokens=num_tokens)

    async def assert_baseline(self) -> None:
        """Every block is free, and nothing is held for anybody; in bounded time."""
        await until(lambda: self.exports.num_held_blocks == 0)
        await until(lambda: self.pool.num_free == NUM_BLOCKS)
        self.pool.check_integrity()


def _state(num_blocks: int, num_tokens: int) -> NDArray[np.uint8]:
    """A byte for each of its blocks, [num_blocks, 1]."""
    return np.arange(num_tokens, num_tokens + num_blocks, dtype=np.uint8)[:, None]


@asynccontextmanager
async def started(*nodes: PrefixNode) -> AsyncIterator[None]:
    """The nodes run within the context; at its end all their blocks must be free."""
    for node in nodes:
        await node.start()
    try:
        yield
        for node in nodes:
            await node.assert_baseline()
    finally:
        for node in nodes:
            await node.close()
