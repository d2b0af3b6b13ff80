"""How KV gets from pool to pool in a life: span by span, over the ways of its network.

One-sided: the puller reads the other pool, whose process may be stopped. Two-sided: the process of
the pool has to take part. Both check the generations at the end, as the real ones do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from kv_transfer.memory import check_generations, cpu_pool
from kv_transfer.transports.catalog import TransportKind
from kv_transfer.transports.interface import Read, Reader, Source
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost
from tests.lives.loop import PROCESS, Process
from tests.lives.network import Network

NAME = "life"
SPAN_S = (0.0, 0.001)
LOOK_S = 0.01


@dataclass
class Pulls:
    """All pools that can be read, and what goes wrong with the next reads."""

    network: Network
    random: Random
    is_two_sided: bool
    slowness: float = 1.0
    num_failing: int = 0
    num_corrupt: int = 0
    num_reads: int = 0
    sources: dict[str, tuple[Process, Source]] = field(default_factory=dict)

    def kind(self) -> TransportKind:
        """For both ends."""
        return TransportKind(
            NAME, lambda source: _Server(self, source), self._transport, frozenset({"cpu"})
        )

    def _transport(self, reader: Reader) -> _Transport:
        return _Transport(self)


class _Server:
    def __init__(self, pulls: Pulls, source: Source) -> None:
        self._pulls = pulls
        self._source = source

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        process = PROCESS.get()
        assert process is not None
        self._pulls.sources[self._source.name] = process, self._source
        return TransportOffer(name=NAME, endpoint=self._source.name)

    async def close(self) -> None:
        self._pulls.sources.pop(self._source.name, None)


class _Transport:
    name = NAME

    def __init__(self, pulls: Pulls) -> None:
        self._pulls = pulls

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        return None

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> _Channel:
        channel = _Channel(self._pulls, offer.endpoint)
        await channel.pass_through()
        channel.source().check_access(welcome.access)
        return channel

    async def close(self) -> None:
        """Nothing is shared."""


class _Channel:
    def __init__(self, pulls: Pulls, endpoint: str) -> None:
        self._pulls = pulls
        self._endpoint = endpoint
        process = PROCESS.get()
        assert process is not None
        self._here = process

    def source(self) -> Source:
        """Whose pool it is. Raises PeerLost: it is gone."""
        return self._find()[1]

    async def pass_through(self) -> None:
        """Take the time that a span takes; longer if the way is cut. Raises PeerLost."""
        pulls, there = self._pulls, self._find()[0]
        way = pulls.network.way(there, self._here)
        seconds = pulls.random.uniform(*SPAN_S) * way.slowness * pulls.slowness
        await asyncio.sleep(seconds)
        while way.is_cut or (pulls.is_two_sided and self._find()[0].is_stopped):
            if way.is_refused:
                raise PeerLost(f"no way to {there}")
            await asyncio.sleep(LOOK_S)
            self._find()

    async def read(self, read: Read) -> None:
        """As Channel.read."""
        pulls = self._pulls
        pulls.num_reads += 1
        if pulls.is_two_sided:
            self.source().open_ticket(read.sealed)
        if pulls.num_failing:
            pulls.num_failing -= 1
            raise PeerLost("a pull that fails")
        destination = cpu_pool(read.destination).flat
        for source_offset, offset, nbytes in read.spans.tolist():
            pool = cpu_pool(self.source().pool)
            destination[offset : offset + nbytes] = pool.flat[source_offset:][:nbytes]
            await self.pass_through()
        source = self.source()
        check_generations(source.pool.generations, read.block_ids, read.generations)
        source.statistics.pulls_served += 1
        if pulls.num_corrupt and len(read.spans):
            pulls.num_corrupt -= 1
            destination[int(read.spans[0, 1])] ^= 1

    async def close(self) -> None:
        """Nothing to close."""

    def _find(self) -> tuple[Process, Source]:
        found = self._pulls.sources.get(self._endpoint)
        if found is None or self._pulls.network.is_gone(found[0]):
            raise PeerLost(f"nobody serves {self._endpoint!r}")
        return found
