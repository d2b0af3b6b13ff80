"""The metadata of an exporter's UCX offer, and the protocol of its control connection.

puller   -> exporter   the access token: the exporter starts to poll its agent
puller   -> exporter   CONNECTED: the exporter need not poll for this puller any more
exporter -> puller     CONNECTED: it has stopped, unless other pullers are connecting
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kv_transfer.cuda.pool import device_pool
from kv_transfer.memory import GENERATION_BYTES, KvPool, cpu_pool
from kv_transfer.transports.ucx.agent import Segment, UcxRegion
from pdserve.protocol import ExporterWelcome
from pdserve.shared.errors import PeerLost

CONNECTED = b"C"
_MAX_BYTES = 256 << 10

_Address = Annotated[int, Meta(gt=0, lt=1 << 62)]  # virtual addresses have 57 bits at most


class UcxOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The metadata of a TransportOffer: what a puller's agent needs in order to read the pool."""

    agent: Annotated[str, Meta(min_length=1, max_length=1024)]
    agent_metadata: bytes
    blocks: _Address
    device: Annotated[int, Meta(ge=0, lt=1 << 16)]
    generations: _Address
    pid_namespace: Annotated[str, Meta(max_length=64)]
    has_rdma: bool

    @staticmethod
    def read(metadata: bytes) -> UcxOffer:
        """Decode metadata. Raises PeerLost: it is invalid."""
        if len(metadata) > _MAX_BYTES:
            raise PeerLost(f"an offer of {len(metadata)} bytes; {_MAX_BYTES} are the limit")
        try:
            return msgspec.msgpack.decode(metadata, type=UcxOffer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerLost(f"the offer's metadata cannot be read: {error}") from error

    def blocks_of(self, welcome: ExporterWelcome) -> UcxRegion:
        """The exporter's blocks. NIXL refuses to read beyond what was registered."""
        num_bytes = welcome.num_blocks * welcome.layout.block_bytes
        segment: Segment = "VRAM" if welcome.memory == "cuda" else "DRAM"
        return UcxRegion(self.blocks, num_bytes, segment, self.device)

    def generations_of(self, welcome: ExporterWelcome) -> UcxRegion:
        """The exporter's generations, which are always in CPU memory."""
        return UcxRegion(self.generations, welcome.num_blocks * GENERATION_BYTES)


def blocks_of(pool: KvPool) -> UcxRegion:
    """The blocks of a pool of this process."""
    if pool.kind == "cuda":
        device = device_pool(pool)
        region = device.region
        return UcxRegion(region.address, region.num_bytes, "VRAM", device.driver.device)
    return UcxRegion.of(cpu_pool(pool).flat)
