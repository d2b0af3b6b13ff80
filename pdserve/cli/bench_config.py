"""What the benchmarks can be told."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.config import ConfigStruct, Count, EngineConfig, ModelConfig, Seconds


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
