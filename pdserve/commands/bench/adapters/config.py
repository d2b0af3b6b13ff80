"""Config of `pdserve bench adapters`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.settings.config import EngineConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.shared.errors import ConfigError


class AdaptersBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench adapters`."""

    shape: Annotated[str, Meta(description="as of pdserve bench step")] = "160m"
    adapters: Annotated[Count, Meta(description="adapters in the batch")] = 8
    rank: Annotated[Count, Meta(description="of these, on all linear layers")] = 16
    streams: Annotated[Count, Meta(description="streams at a time")] = 16
    tokens: Annotated[Count, Meta(description="output tokens of each stream")] = 128
    prompt_tokens: Annotated[Count, Meta(description="of prompts, whose prefill is timed")] = 512
    cold: Annotated[Count, Meta(description="calls of adapters that no node has a place for")] = 20
    known: Annotated[Count, Meta(description="adapters in all; the others have rank 1")] = 1000
    rounds: Annotated[Count, Meta(description="with adapters and without, in turns")] = 3
    deadline_s: Annotated[Seconds, Meta(description="deadline for each part")] = 600.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = EngineConfig()

    @property
    def others(self) -> int:
        """Adapters that are neither in the batch nor called when they are cold.

        Raises:
            ConfigError: they would all have a place.
        """
        others = self.known - self.adapters - self.cold
        if others + self.adapters < self.engine.max_adapters or self.adapters < 1:
            raise ConfigError(
                f"{self.known} adapters, of which {self.cold} should be cold and "
                f"{self.adapters} are not: name more (known) or lower engine.max_adapters, "
                f"{self.engine.max_adapters}"
            )
        return others


class Turn(msgspec.Struct, frozen=True):
    """Streams at a time, without adapters or with them. Milliseconds of a decode step's model."""

    without_ms: float
    with_ms: float

    @property
    def kept(self) -> float:
        """Share of the speed of none."""
        return self.without_ms / self.with_ms


class AdaptersReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench adapters`."""

    decode: list[Turn]
    prefill: list[Turn]  # of the time until token 1 of one prompt alone
    warm_ms: list[float]  # of short calls of one token: of adapters that have a place
    cold_ms: list[float]  # of those that have none
    load_average: float
