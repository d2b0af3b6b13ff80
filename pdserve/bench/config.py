"""Configs of the benchmarks of KV transfer, routing and predictions, and of step overhead."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.config import (
    CheckpointConfig,
    ConfigStruct,
    Count,
    EngineConfig,
    Seconds,
    TransportName,
)
from pdserve.config_values import parse_bytes
from pdserve.errors import ConfigError

NetworkName = Literal["loopback", "netns"]

_QUICK_BLOCK_KIB = 1024
_QUICK_BLOCKS = 256


class OverheadConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench overhead`."""

    batches: Annotated[list[Count], Meta(description="decode batch sizes to measure")] = (
        msgspec.field(default_factory=lambda: [1, 4, 16, 64])
    )
    tokens: Annotated[Count, Meta(description="output tokens of each stream")] = 1024
    deadline_s: Annotated[Seconds, Meta(description="deadline for each batch size")] = 300.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()


class TransferConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench transfer`."""

    transports: Annotated[
        list[TransportName], Meta(description="transports to measure; empty: all")
    ] = msgspec.field(default_factory=list)
    networks: Annotated[
        list[NetworkName],
        Meta(description="loopback, or netns: each process in a network namespace of its own"),
    ] = msgspec.field(default_factory=lambda: ["loopback", "netns"])
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
    small_pages: Annotated[bool, Meta(description="pools without huge pages")] = False
    quick: Annotated[
        bool, Meta(description="only blocks up to 1 MiB and pulls up to 256 blocks")
    ] = False
    deadline_s: Annotated[Seconds, Meta(description="deadline for each step of either process")] = (
        120.0
    )
    json: Annotated[bool, Meta(description="print JSON")] = False

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


class HandoffBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench handoff`."""

    concurrency: Annotated[Count, Meta(description="requests in flight at a time")] = 16
    requests: Annotated[
        Count, Meta(description="requests in total, rounded up to whole rounds")
    ] = 320
    prompt_tokens: Annotated[
        list[Count], Meta(description="shortest and longest prompt length")
    ] = msgspec.field(default_factory=lambda: [64, 512])
    output_tokens: Annotated[Count, Meta(description="output tokens per request")] = 32
    transports: Annotated[
        list[TransportName],
        Meta(description="KV transports, best first; empty: all that are useful here"),
    ] = msgspec.field(default_factory=list)
    deadline_s: Annotated[Seconds, Meta(description="deadline for each round")] = 120.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def rounds(self) -> int:
        """How often `concurrency` requests are sent together."""
        return -(-self.requests // self.concurrency)

    @property
    def prompt_range(self) -> tuple[int, int]:
        """(shortest, longest), tokens.

        Raises:
            ConfigError: these are not two numbers, the smaller one first.
        """
        if len(self.prompt_tokens) != 2 or self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise ConfigError(
                f"--prompt-tokens {','.join(map(str, self.prompt_tokens))}: give the shortest and "
                "the longest, as in 64,512"
            )
        return self.prompt_tokens[0], self.prompt_tokens[1]


class PerfModelConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench perf-model`."""

    steps: Annotated[
        Count, Meta(description="steps per phase that are held out of the profile")
    ] = 60
    repeats: Annotated[Count, Meta(description="measurements per held-out step")] = 9
    seed: Annotated[int, Meta(description="random seed of the held-out steps")] = 0
    profile_s: Annotated[Seconds, Meta(description="time to spend on profiling")] = 3.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()


class RouterBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench router`."""

    nodes: Annotated[int, Meta(ge=2, description="nodes in total, half in each pool")] = 1000
    nodes_per_host: Annotated[
        Count, Meta(description="nodes that share a host, of both pools in turns")
    ] = 8
    blocks: Annotated[Count, Meta(description="cached blocks in the prefix index")] = 1_000_000
    prompt_tokens: Annotated[list[Count], Meta(description="prompt lengths to place")] = (
        msgspec.field(default_factory=lambda: [512, 4096, 32768])
    )
    decisions: Annotated[int, Meta(ge=2, description="placements per configuration")] = 500
    json: Annotated[bool, Meta(description="print JSON")] = False
