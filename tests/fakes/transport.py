"""A transport within one process, for tests: it can pause and fail.

It copies spans one after the other in Python, on the event loop, so that a test can control how
far a read has come.
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from kv_transfer.memory import check_generations, cpu_pool
from kv_transfer.transports.interface import Read, Reader, Source
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost, TransferError


class FakeNetwork:
    """Connects fake servers and transports. Give `server` to exporters, `transport` to pullers.

    While paused, a read hangs after its first span. The error `fail_with`, until it is reset to
    None, ends every read after its first span. `wrong_bytes` has, for each of the next reads, the
    position of a byte that arrives flipped, without any error.
    """

    def __init__(self) -> None:
        self._names = itertools.count()
        self.sources: dict[str, Source] = {}  # endpoint |-> exporter
        self.fail_with: TransferError | None = None
        self.wrong_bytes: list[int] = []
        self.flowing = asyncio.Event()
        self.flowing.set()

    def server(self, source: Source) -> FakeServer:
        """A ServerFactory."""
        return FakeServer(self, source, f"fake-{next(self._names)}")

    def transport(self, reader: Reader) -> FakeTransport:
        """A TransportFactory."""
        return FakeTransport(self)

    def pause(self) -> None:
        """Reads hang from now on."""
        self.flowing.clear()

    def resume(self) -> None:
        """Reads go on."""
        self.flowing.set()


class FakeServer:
    """Registered with the network while it is running."""

    def __init__(self, network: FakeNetwork, source: Source, endpoint: str) -> None:
        self._network = network
        self._source = source
        self._endpoint = endpoint

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Cannot fail."""
        self._network.sources[self._endpoint] = self._source
        return TransportOffer(name="fake", endpoint=self._endpoint)

    async def close(self) -> None:
        """Reads in flight and later ones see PeerLost."""
        self._network.sources.pop(self._endpoint, None)


class FakeTransport:
    """Connects to all running servers."""

    name = "fake"

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """None: it works everywhere."""
        return None

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> FakeChannel:
        """Raises PeerLost: no such server."""
        channel = FakeChannel(self._network, offer.endpoint)
        channel.find_source().check_access(welcome.access)
        return channel

    async def close(self) -> None:
        """Nothing is shared."""


class FakeChannel:
    """Implements Channel, span by span."""

    def __init__(self, network: FakeNetwork, endpoint: str) -> None:
        self._network = network
        self._endpoint = endpoint

    def find_source(self) -> Source:
        """The exporter. Raises PeerLost: the server is closed."""
        source = self._network.sources.get(self._endpoint)
        if source is None:
            raise PeerLost(f"nobody serves {self._endpoint!r}")
        return source

    async def read(self, read: Read) -> None:
        """As Channel.read."""
        self.find_source().open_ticket(read.sealed)
        for source_offset, offset, nbytes in read.spans.tolist():
            pool = cpu_pool(self.find_source().pool)
            destination = cpu_pool(read.destination).flat
            destination[offset : offset + nbytes] = pool.flat[source_offset:][:nbytes]
            await asyncio.sleep(0)
            await self._network.flowing.wait()
            if self._network.fail_with is not None:
                raise self._network.fail_with
        source = self.find_source()
        check_generations(source.pool.generations, read.block_ids, read.generations)
        source.statistics.pulls_served += 1
        if self._network.wrong_bytes:
            _flip(read, self._network.wrong_bytes.pop(0))

    async def close(self) -> None:
        """Nothing to close."""


def _flip(read: Read, position: int) -> None:
    """Flip a bit of one byte in the destination."""
    ends = np.cumsum(read.spans[:, 2])
    span = int(np.searchsorted(ends, position, side="right"))
    offset = int(read.spans[span, 1] + read.spans[span, 2] - ends[span] + position)
    cpu_pool(read.destination).flat[offset] ^= 1
