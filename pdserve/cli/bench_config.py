"""What the benchmarks can be told."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.config import (
    ConfigStruct,
    Count,
    EngineConfig,
    ModelConfig,
    Seconds,
    TransportName,
    parse_bytes,
)
from pdserve.errors import ConfigError

NetworkName = Literal["loopback", "netns"]

_QUICK_BLOCK_KIB = 1024
_QUICK_BLOCKS = 256


class OverheadConfig(ConfigStruct, frozen=True):
    """What `pdserve bench overhead` can be told."""

    batches: Annotated[list[Count], Meta(description="decode batch sizes to measure")] = (
        msgspec.field(default_factory=lambda: [1, 4, 16, 64])
    )
    tokens: Annotated[Count, Meta(description="tokens of each stream")] = 1024
    deadline_s: Annotated[Seconds, Meta(description="for each batch size")] = 300.0
    json: Annotated[bool, Meta(description="for programs")] = False
    checkpoint: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()


class TransferConfig(ConfigStruct, frozen=True):
    """What `pdserve bench transfer` can be told."""

    transports: Annotated[
        list[TransportName], Meta(description="to measure; empty: all there are")
    ] = msgspec.field(default_factory=list)
    networks: Annotated[
        list[NetworkName],
        Meta(description="loopback: both processes in ours; netns: each in a namespace of its own"),
    ] = msgspec.field(default_factory=lambda: ["loopback", "netns"])
    block_kib: Annotated[list[Count], Meta(description="sizes of a block, KiB")] = msgspec.field(
        default_factory=lambda: [64, 256, 1024, 2048]
    )
    blocks: Annotated[
        list[Count], Meta(description="blocks of a pull, as far as the pool's memory goes")
    ] = msgspec.field(default_factory=lambda: [1, 16, 256, 2048])
    memory: Annotated[
        str, Meta(description="of each pool at most; one exporter's, two in the puller")
    ] = "1GiB"
    small_pages: Annotated[
        bool, Meta(description="pools as nodes have them without --kv-commit: no huge pages")
    ] = False
    quick: Annotated[
        bool, Meta(description="only blocks of up to 1 MiB, and pulls of up to 256 of them")
    ] = False
    deadline_s: Annotated[Seconds, Meta(description="for each step of either process")] = 120.0
    json: Annotated[bool, Meta(description="for programs")] = False

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
            raise ConfigError(f"--quick leaves no block size: give one of up to {most} KiB")
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
            raise ConfigError(f"--quick leaves no number of blocks: give one of up to {most}")
        return kept


class HandoverConfig(ConfigStruct, frozen=True):
    """What `pdserve bench handover` can be told."""

    concurrency: Annotated[Count, Meta(description="requests at a time")] = 16
    requests: Annotated[Count, Meta(description="in all, rounded up to whole rounds")] = 320
    prompt_tokens: Annotated[
        list[Count], Meta(description="of the shortest and of the longest prompt")
    ] = msgspec.field(default_factory=lambda: [64, 512])
    output_tokens: Annotated[Count, Meta(description="of each request")] = 32
    transports: Annotated[
        list[TransportName], Meta(description="for KV, best first; empty: all that work here")
    ] = msgspec.field(default_factory=list)
    deadline_s: Annotated[Seconds, Meta(description="for each round")] = 120.0
    json: Annotated[bool, Meta(description="for programs")] = False
    checkpoint: ModelConfig = ModelConfig()
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
    """What `pdserve bench perf-model` can be told."""

    steps: Annotated[Count, Meta(description="held out of the profile, of each phase")] = 60
    repeats: Annotated[Count, Meta(description="times that each of them is measured")] = 9
    seed: Annotated[int, Meta(description="of the steps held out")] = 0
    profile_s: Annotated[Seconds, Meta(description="for profiling, as on a node")] = 3.0
    json: Annotated[bool, Meta(description="for programs")] = False
    checkpoint: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()


class RouterBenchConfig(ConfigStruct, frozen=True):
    """What `pdserve bench router` can be told."""

    nodes: Annotated[int, Meta(ge=2, description="half of them for each pool")] = 1000
    blocks: Annotated[Count, Meta(description="cached blocks in the prefix index")] = 1_000_000
    prompt_tokens: Annotated[list[Count], Meta(description="lengths of prompts to place")] = (
        msgspec.field(default_factory=lambda: [512, 4096, 32768])
    )
    decisions: Annotated[int, Meta(ge=2, description="of each kind")] = 500
    json: Annotated[bool, Meta(description="for programs")] = False
