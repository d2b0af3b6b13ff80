"""A link whose exporter makes something of a codec that nobody can decode."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kv_transfer.links.link import open_link
from kv_transfer.spans.box import whole_box
from kv_transfer.statistics import PullerStatistics
from kv_transfer.transports.interface import Read
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import CorruptTransfer
from pdserve.shared.simulated_link import SimulatedLink
from tests.unit.kv_transfer.pairs import open_pair

LAYOUT = KvLayout.gqa(layers=4, heads=4, head_dim=64, block_size=16, dtype=KvDtype.BFLOAT16)
MIB = 1 << 20


class SickTransport:
    """Brings bytes as they are, and none with a codec."""

    name = "sick"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        return None

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> SickTransport:
        return self

    async def read(self, read: Read) -> None:
        assert read.sending is not None
        self.asked.append(read.sending.codec)
        if read.sending.codec:
            raise CorruptTransfer("what came from a peer cannot be decoded")
        read.sending.num_bytes = read.sending.arrived = read.num_bytes

    async def close(self) -> None: ...


async def test_a_codec_that_cannot_be_decoded_is_asked_for_once() -> None:
    transport, nothing = SickTransport(), np.empty((0, 3), dtype=np.int64)
    offer = TransportOffer(name="sick", endpoint="", codecs=["zstd"])
    async with open_pair("fake", LAYOUT) as pair:
        welcome = msgspec.structs.replace(pair.exporter.welcome(), offers=[offer])
        slow = SimulatedLink(bandwidth=4e7)  # far from what a core codes
        link = await open_link(welcome, [transport], 5, PullerStatistics(), slow)
        none = np.empty(0, dtype=np.uint64)
        box = whole_box(LAYOUT, 0, 16)
        read = Read(b"t", box, nothing[:, 0], none, nothing, 2 * MIB, pair.destination)
        await link.read(read)
        with pytest.raises(CorruptTransfer):
            await link.read(read)
        for _ in range(3):
            await link.read(read)
        assert transport.asked == ["", "zstd", "", "", ""]
        await link.close()
