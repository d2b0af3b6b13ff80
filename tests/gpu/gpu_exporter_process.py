"""An exporter with a pool on a GPU, in a process of its own: prints its welcome, then serves.

argv: the transport to offer, the GPU. Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from kv_transfer.cuda.catalog import open_driver
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.transports.catalog import choose_kinds
from pdserve.engine.kv.cache import KvCache
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import ExporterWelcome
from pdserve.shared.clock import ManualClock

LAYOUT = KvLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype=KvDtype.BFLOAT16)
IDENTITY = KvIdentity("a-model", "main", LAYOUT)
NUM_BLOCKS = 64
NUM_TOKENS = 250


def seed(cache: KvCache) -> None:
    """The same numbers in every process."""
    import torch

    generator = torch.Generator().manual_seed(1)
    values = torch.randn(cache.pool.shape, generator=generator)
    cache.pool.copy_(values.to(cache.pool.dtype))
    torch.cuda.synchronize(cache.pool.device)


class Started(msgspec.Struct):
    """What the parent needs to know."""

    welcome: ExporterWelcome
    fresh: bytes  # a ticket for NUM_TOKENS tokens in blocks 40, 39, ...
    stale: bytes  # the same, but the blocks have changed hands


async def main(kind: str, device: int) -> None:
    import torch

    pool = DevicePool(NUM_BLOCKS, LAYOUT.block_bytes, open_driver(device))
    seed(KvCache(LAYOUT, NUM_BLOCKS, torch.device("cuda", device), pool))
    kinds = choose_kinds([kind], pool)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(100.0), kinds)
    await exporter.start("127.0.0.1")
    block_ids = [40 - i for i in range(LAYOUT.blocks_for(NUM_TOKENS))]
    stale = exporter.issue("r", 0, NUM_TOKENS, block_ids)
    pool.bump([40])
    started = Started(exporter.welcome(), exporter.issue("r", 0, NUM_TOKENS, block_ids), stale)
    sys.stdout.buffer.write(msgspec.json.encode(started) + b"\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await exporter.close()
    pool.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
