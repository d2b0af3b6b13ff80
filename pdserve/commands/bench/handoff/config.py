"""Config of `pdserve bench handoff`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.settings.config import CheckpointConfig, EngineConfig, Transports
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.shared.errors import ConfigError
from pdserve.shared.simulated_link import check_links

WireForm = Literal["raw", "lossless", "int8", "fp8"]
RAW: Final = "raw"


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
    links: Annotated[
        list[str], Meta(description="networks to simulate between nodes, as handoff.links")
    ] = msgspec.field(default_factory=list)
    wire: Annotated[
        list[WireForm],
        Meta(
            description="forms of KV to compare over the links, by prompts one at a time: raw, "
            "lossless, int8, fp8; --requests and --concurrency do not count then"
        ),
    ] = msgspec.field(default_factory=list)
    transports: Transports = msgspec.field(default_factory=list)
    deadline_s: Annotated[Seconds, Meta(description="deadline for each round")] = 120.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if forms have no network to differ on."""
        check_links(self.links)
        if self.wire and not self.links:
            raise ValueError("--wire: give the network, as in --links '* * bandwidth=1.25e8'")

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
