"""Config of `pdserve bench transfer`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.settings.config import TransportName
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError
from pdserve.shared.simulated_link import SimulatedLink, parse_link

NetworkName = Literal["loopback", "netns"]

_QUICK_BLOCK_KIB = 1024
_QUICK_BLOCKS = 256


class TransferConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench transfer`."""

    transports: Annotated[
        list[TransportName], Meta(description="transports to measure; empty: all")
    ] = msgspec.field(default_factory=list)
    networks: Annotated[
        list[NetworkName],
        Meta(description="loopback, or netns: each process in a network namespace of its own"),
    ] = msgspec.field(default_factory=lambda: ["loopback", "netns"])
    devices: Annotated[
        list[Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]+)?)$")]],
        Meta(
            min_length=1,
            max_length=2,
            description="where the pools are: cpu, a GPU such as cuda:0, or those of exporter and "
            "puller",
        ),
    ] = msgspec.field(default_factory=lambda: ["cpu"])
    tensor_parallel: Annotated[
        int,
        Meta(ge=1, le=8, description="parts of each pool, as of nodes with so many ranks on GPUs"),
    ] = 1
    pipeline_parallel: Annotated[
        Count, Meta(description="stages of these nodes, each with such parts of its own layers")
    ] = 1
    block_kib: Annotated[list[Count], Meta(description="block sizes, KiB")] = msgspec.field(
        default_factory=lambda: [64, 256, 1024, 2048]
    )
    blocks: Annotated[
        list[Count], Meta(description="blocks per pull, as far as they fit into the pool")
    ] = msgspec.field(default_factory=lambda: [1, 16, 256, 2048])
    memory: Annotated[
        str,
        Meta(description="maximum memory per pool; the exporter has one pool, the puller two"),
    ] = "1GiB"
    link: Annotated[
        str,
        Meta(
            description="a simulated network, as for --links of bench handoff: pull the KV of "
            "4,096 tokens over it in each form in which it may be sent, and nothing else"
        ),
    ] = ""
    small_pages: Annotated[bool, Meta(description="pools without huge pages")] = False
    quick: Annotated[
        bool, Meta(description="only blocks up to 1 MiB and pulls up to 256 blocks")
    ] = False
    deadline_s: Annotated[Seconds, Meta(description="deadline for each step of either process")] = (
        120.0
    )
    json: Annotated[bool, Meta(description="print JSON")] = False

    @property
    def simulated_link(self) -> SimulatedLink | None:
        """The network to simulate, if any.

        Raises:
            ConfigError: `link` is none.
        """
        try:
            return parse_link(self.link) if self.link else None
        except ValueError as error:
            raise ConfigError(f"--link: {error}") from error

    @property
    def both_devices(self) -> tuple[str, str]:
        """Of the exporter and of the puller."""
        return self.devices[0], self.devices[-1]

    @property
    def memory_bytes(self) -> int:
        """Most bytes of a pool.

        Raises:
            ConfigError: `memory` is not a size.
        """
        return parse_bytes(self.memory)

    @property
    def block_sizes(self) -> list[int]:
        """Bytes of a block, for each size to measure.

        Raises:
            ConfigError: a quick run leaves none.
        """
        most = _QUICK_BLOCK_KIB if self.quick else max(self.block_kib)
        kept = [size << 10 for size in self.block_kib if size <= most]
        if not kept:
            raise ConfigError(f"--quick needs at least one block size of up to {most} KiB")
        return kept

    @property
    def counts(self) -> list[int]:
        """Blocks of a pull, for each row to measure.

        Raises:
            ConfigError: a quick run leaves none.
        """
        most = _QUICK_BLOCKS if self.quick else max(self.blocks)
        kept = [count for count in self.blocks if count <= most]
        if not kept:
            raise ConfigError(f"--quick needs at least one number of blocks of up to {most}")
        return kept
