"""Which transports for KV work here.

Transports of CPU memory are tested by moving a block. For those between GPUs only missing
requirements are reported: CUDA cannot open memory of the same process, so a test would take two.
"""

from __future__ import annotations

import asyncio
import secrets

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import KINDS, TransportKind
from pdserve import _native
from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import PdserveError

_TOPIC = "KV transports"
_TRY_S = 10.0
_LAYOUT = KvLayout.gqa(layers=1, heads=1, head_dim=64, block_size=16, dtype=KvDtype.FLOAT32)
_NEEDED_FOR = {
    "shm": "KV transfer on one host at memory speed",
    "cuda_ipc": "KV transfer between GPUs of one host",
    "ucx": "KV transfer over RDMA, and between GPUs of different hosts",
    "nccl": "KV transfer between GPUs where NIXL cannot be installed",
    "tcp": "KV transfer between any two nodes on CPUs",
}


def transport_components() -> list[Component]:
    """All transports, best first: two nodes use the first one that both have."""
    return asyncio.run(_try_all())


async def _try_all() -> list[Component]:
    failures = [(kind, await failure(kind)) for kind in KINDS]
    works = [kind.name for kind, failed in failures if not failed and "cpu" in kind.memory]
    return [
        _component(kind, failed, is_taken=kind.name == next(iter(works), ""))
        for kind, failed in failures
    ]


async def failure(kind: TransportKind) -> str:
    """Pull a block from this process over the transport; what failed, or an empty text."""
    if "cpu" not in kind.memory:
        return kind.missing() or ""
    identity = KvIdentity("doctor", "", _LAYOUT)
    source, destination = (ExportedPool(2, _LAYOUT.block_bytes) for _ in range(2))
    exporter = Exporter("doctor", secrets.token_hex(8), identity, source, SystemClock(), [kind])
    puller = Puller(destination, identity, host_id(), [kind])
    try:
        async with asyncio.timeout(_TRY_S):
            await exporter.start("127.0.0.1")
            (offer,) = exporter.offers
            return offer.unavailable or await _pull_one(exporter, puller, source, destination)
    except TimeoutError:
        return f"nothing arrived within {_TRY_S:g} s"
    except (PdserveError, OSError) as error:
        return str(error)
    finally:
        await puller.close()
        await exporter.close()
        source.close()
        destination.close()


async def _pull_one(
    exporter: Exporter, puller: Puller, source: ExportedPool, destination: ExportedPool
) -> str:
    source.data[1] = 7
    link = await puller.connect(exporter.welcome(), _TRY_S)
    try:
        ticket = exporter.issue("doctor", 0, _LAYOUT.block_size, [1])
        await puller.pull(link, ticket, [0], 0, _TRY_S)
    finally:
        await link.close()
    return "" if (destination.data[0] == 7).all() else "the block arrived with other content"


def _component(kind: TransportKind, failed: str, *, is_taken: bool) -> Component:
    # Without TCP, two nodes may have no transport at all; the others are only faster.
    otherwise = Availability.BROKEN if kind.name == "tcp" else Availability.ABSENT
    return Component(
        topic=_TOPIC,
        name=kind.name,
        verdict=otherwise if failed else Availability.OK,
        detail=failed or _praise(kind, is_taken=is_taken),
        needed_for=_NEEDED_FOR[kind.name],
    )


def _praise(kind: TransportKind, *, is_taken: bool) -> str:
    if "cpu" not in kind.memory:
        return "installed, not tried"
    taken = "; what CPU nodes on this host take, the best there is" if is_taken else ""
    return f"works here{taken}{_copies() if kind.name == 'shm' else ''}"


def _copies() -> str:
    """How fast large spans are copied, and in which way."""
    span_bytes, rates = max(_native.copy_rates().items())
    ways = {way: rates[way] / 1e9 for way in rates if not way.endswith("summed")}
    fastest = max(ways, key=lambda way: ways[way])
    summed = max(rate for way, rate in rates.items() if way not in ways) / 1e9
    return (
        f"; copies {span_bytes >> 10} KiB at {ways[fastest]:.1f} GB/s ({fastest}), "
        f"{summed:.1f} with checksums, memcpy at {ways['cached']:.1f}"
    )
