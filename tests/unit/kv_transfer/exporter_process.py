"""An exporter in a process of its own: prints its welcome and an endless ticket, then serves.

argv: the transport to offer. Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from pdserve.protocol import ExporterWelcome
from tests.unit.kv_transfer.pairs import ENDLESS_BLOCKS, LARGE, make_exporter, make_pool


class Started(msgspec.Struct):
    """What the parent needs to know."""

    welcome: ExporterWelcome
    endless: bytes
    short: bytes  # one block, number 3


async def main(kind: str) -> None:
    pool = make_pool(LARGE, 4, seed=1)
    exporter, _ = make_exporter(pool, LARGE, kind)
    await exporter.start("127.0.0.1")
    size = LARGE.block_size
    endless = exporter.issue("endless", 0, ENDLESS_BLOCKS * size, [1] * ENDLESS_BLOCKS)
    started = Started(exporter.welcome(), endless, exporter.issue("short", 0, size, [3]))
    sys.stdout.buffer.write(msgspec.json.encode(started) + b"\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await exporter.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
