"""Moves blocks between a node's pool and its host tier: down in the background, up on demand.

    referenced ──last reference goes──► cached ──store──► cached, and in the tier ──evict──► tier
        ▲                                                                                     │
        └──────────────────────────── load, into a block of the pool ◄────────────────────────┘

A cached block is copied to the tier as soon as it is not referenced any more, a few at a time. So
evicting it later is free, and an eviction never waits for a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from kv_transfer.cuda.catalog import open_driver
from kv_transfer.cuda.driver import DeviceError, Driver
from kv_transfer.cuda.pinned import PinnedCopies, PinnedHostBlocks
from kv_transfer.cuda.pool import device_pool
from kv_transfer.hosts.far_host import FarHost
from kv_transfer.memory import KvPool, cpu_pool
from kv_transfer.sharded_pool import parts_here
from kv_transfer.tier import CpuCopies, FileBlocks, HostTier, TierCopies
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.node.memory.meminfo import available_bytes, total_bytes
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.store.opening import check_store
from pdserve.node.start.model import NodeModel
from pdserve.settings.config import NodeConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError, CorruptTransfer, StaleTicket, TransportUnavailable
from pdserve.shared.process.file_lock import file_lock
from pdserve.shared.process.may_pass import NotNow
from pdserve.shared.process.user_cache import cache_folder

log = logging.getLogger(__name__)

BATCH = 16  # blocks copied, and so not evictable, at a time
KEPT_SHARE = 8  # at most one of this many free blocks is being copied
KEPT_MEMORY = 16  # one of this many bytes of the machine is not pinned, for all else there is
ABOVE_STORE = 256 << 20  # bytes of a tier that is there because a store is
PIN_S = 600.0  # in which all nodes that start together on this machine have pinned

TierBlocks: TypeAlias = FileBlocks | PinnedHostBlocks  # the memory of a tier


@dataclass(frozen=True, slots=True)
class Machine:
    """The one whose memory is pinned."""

    open_driver: Callable[[int], Driver] = open_driver
    available_bytes: Callable[[], int] = available_bytes
    total_bytes: Callable[[], int] = total_bytes
    pin_s: float = PIN_S


HERE = Machine()


def make_tier_blocks(
    config: NodeConfig, model: NodeModel, machine: Machine = HERE
) -> TierBlocks | None:
    """The memory of the configured tier on this host; None if there is none, or no room for it.

    A node without a tier serves all the same, only slower at times. Reserving much takes seconds,
    so this must not run on the event loop.

    Raises:
        ConfigError: it is smaller than a block, or is in no directory.
    """
    prefix, sizes = config.prefix, model.part_sizes
    budget_bytes = parse_bytes(prefix.tier_memory) or (ABOVE_STORE if prefix.kv_store else 0)
    if budget_bytes == 0:
        return None
    if prefix.kv_store and config.engine.rank_hosts and model.device.type != "cpu":
        raise ConfigError(
            f"kv_store {prefix.kv_store!r}: this host has only some of the KV, as rank_hosts have "
            "GPUs with the rest: leave it out"
        )
    if prefix.kv_store:
        check_store(prefix)
    num_blocks = budget_bytes // sum(sizes)
    if num_blocks == 0:
        raise ConfigError(
            f"tier_memory {prefix.tier_memory!r} is less than a block, {sum(sizes)} bytes"
        )
    log.info("host tier: %d blocks in %d MiB", num_blocks, budget_bytes >> 20)
    if prefix.tier_dir and model.device.type != "cpu":
        raise ConfigError(
            f"tier_dir {prefix.tier_dir!r} is for CPUs: a GPU's tier is in pinned memory and not "
            "in a file, so leave it out"
        )
    try:
        return slots_of(model, num_blocks, prefix.tier_dir, machine)
    except NotNow as error:
        log.warning("there is no host tier until this node is started again: %s", error)
        return None


def slots_of(
    model: NodeModel, num_blocks: int, tier_dir: str = "", machine: Machine = HERE
) -> TierBlocks:
    """Memory for so many blocks of the parts that this host has.

    Raises:
        ConfigError: there can be none.
        NotNow: there is none left.
    """
    sizes = model.part_sizes
    if model.device.type == "cpu":
        return FileBlocks(num_blocks, sizes, tier_dir)
    wanted = num_blocks * sum(sizes)
    with _turn_to_pin(machine.pin_s):
        room = machine.available_bytes() - machine.total_bytes() // KEPT_MEMORY
        if wanted > room:  # what pinning does then is up to the kernel: it kills
            raise NotNow(
                f"tier_memory: {wanted >> 20}MiB are pinned when the node starts, and "
                f"{max(0, room) >> 20}MiB can be: lower it"
            )
        try:
            driver = machine.open_driver(model.device.index or 0)
            return PinnedHostBlocks(num_blocks, sizes, driver)
        except TransportUnavailable as error:
            raise ConfigError(f"tier_memory on a GPU takes pinned memory: {error}") from error
        except DeviceError as error:
            raise NotNow(f"tier_memory of {wanted >> 20}MiB: {error}; lower it") from error


@contextmanager
def _turn_to_pin(pin_s: float) -> Iterator[None]:
    """Nodes that start together pin one after the other, so each sees what is left.

    Raises:
        NotNow: others take too long.
    """
    folder = cache_folder("host-tier")
    with ExitStack() as held:
        try:
            if folder is None:
                raise FileNotFoundError("there is no home directory")
            folder.mkdir(parents=True, exist_ok=True)
            lock = file_lock(folder / "pinning.lock", pin_s, lambda: None)
            is_ours = held.enter_context(lock)
        except OSError as error:
            log.warning("nodes that start together may pin too much: no lock: %s", error)
        else:
            if not is_ours:
                raise NotNow(
                    f"other nodes have been pinning their tier_memory for {pin_s:.0f} s: start "
                    "this one again"
                )
        yield


def make_tier(
    blocks: TierBlocks | None, memory: KvPool, pool: BlockPool, hosts: Sequence[FarHost] = ()
) -> NodeTier | None:
    """A tier in this memory for a node's pool, not started yet; None without memory.

    `hosts` have the slots of the parts that they have.
    """
    if blocks is None:
        return None
    copies = slot_copies(blocks, memory)
    return NodeTier(pool, HostTier(blocks.num_blocks, copies, hosts, pool.companions))


def slot_copies(blocks: TierBlocks, memory: KvPool) -> list[TierCopies]:
    """The copies of each part of the pool that is here."""
    parts = enumerate(parts_here(memory).values())
    if isinstance(blocks, FileBlocks):
        return [CpuCopies(cpu_pool(part), blocks, number) for number, part in parts]
    return [PinnedCopies(device_pool(part), blocks, number) for number, part in parts]


class NodeTier:
    """A node's host tier. Belongs to the event loop; owns the `HostTier`."""

    def __init__(self, pool: BlockPool, tier: HostTier) -> None:
        self.tier = tier
        self._pool = pool
        self._freed: dict[bytes, None] = {}  # to be copied, in the order of being freed
        self._wake = asyncio.Event()
        pool.observe(self)
        pool.on_release(self._wake.set)
        self._storing: asyncio.Task[None] | None = None
        self._fault = ""  # why the last copy failed; empty if it succeeded

    def start(self) -> None:
        """Copy every block that is freed from now on."""
        self._storing = asyncio.create_task(self._store_freed())

    async def close(self) -> None:
        """Stop copying. Nothing may be loading."""
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.gather(self._storing, return_exceptions=True)
        self.tier.close()

    # ---- CacheObserver -------------------------------------------------------------------------

    def stored(self, block_hash: bytes) -> None:
        """As CacheObserver.stored. The block is copied later, when it is freed."""

    def evicted(self, block_hash: bytes) -> None:
        """As CacheObserver.evicted. The block has been copied, or it is too late."""
        self._freed.pop(block_hash, None)

    def freed(self, block_hash: bytes) -> None:
        """As CacheObserver.freed."""
        if block_hash not in self.tier:
            self._freed[block_hash] = None

    # ---- down ----------------------------------------------------------------------------------

    async def _store_freed(self) -> None:
        while True:
            self._wake.clear()
            num_blocks = min(BATCH, self._pool.num_free // KEPT_SHARE, len(self._freed))
            if num_blocks == 0:
                await self._wake.wait()
            else:
                await self._try_to_store([self._next() for _ in range(num_blocks)])

    def _next(self) -> bytes:
        block_hash = next(iter(self._freed))
        del self._freed[block_hash]
        return block_hash

    async def _try_to_store(self, hashes: list[bytes]) -> None:
        """Store these blocks; whatever goes wrong costs these copies alone, and is logged once.

        They are tried again after their next use, not at once, which would go on for ever.
        """
        try:
            await self._store(hashes)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._fault:
                log.exception("blocks were not copied to the host tier: %s", fault)
            self._fault = fault
            for block_hash in hashes:
                self._freed.pop(block_hash, None)
        else:
            self._fault = ""

    async def _store(self, hashes: list[bytes]) -> None:
        blocks = [(h, b) for h in hashes for b in self._pool.take_prefix([h])]
        block_ids = [block_id for _, block_id in blocks]
        try:
            await self.tier.store([block_hash for block_hash, _ in blocks], block_ids)
        finally:
            # In reverse, which keeps the order in which they will be evicted.
            self._pool.release(block_ids[::-1])

    # ---- up ------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many blocks, from the first on, are in the tier or in the pool."""
        return sum(1 for _ in takewhile(lambda h: h in self.tier or h in self._pool, hashes))

    async def load(self, hashes: Sequence[bytes], block_ids: list[int], headroom: Headroom) -> None:
        """Append to `block_ids`, which hold the first of these blocks, what tier and pool have.

        Blocks that the pool holds are not copied. New blocks are published, and referenced like the
        others; they are appended once they are complete. Stops early if neither has the next block,
        or if there is no room for it.
        """
        while len(block_ids) < len(hashes):
            block_ids += headroom.take_prefix(hashes[len(block_ids) :])
            rest = hashes[len(block_ids) :]
            wanted = list(takewhile(lambda h: h in self.tier and h not in self._pool, rest))
            wanted = wanted[: headroom.num_spare]
            if not wanted or not (loaded := await self._load(wanted)):
                return
            block_ids += loaded

    async def _load(self, hashes: Sequence[bytes]) -> list[int]:
        """Load and publish these blocks; none if the tier evicts or has lost one of them."""
        taken = self._pool.allocate(len(hashes))
        try:
            await self.tier.load(hashes, taken)
        except StaleTicket as error:
            log.info("evicted from the host tier while it was loaded: %s", error)
            self._pool.release(taken)
            return []
        except CorruptTransfer as error:
            log.warning("wrong bytes, which are computed instead: %s", error)
            self._pool.release(taken)
            return []
        except BaseException:
            self._pool.release(taken)
            raise
        for block_id, block_hash in zip(taken, hashes, strict=True):
            self._pool.publish(block_id, block_hash)
        return taken
