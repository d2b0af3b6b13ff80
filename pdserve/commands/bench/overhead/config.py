"""Config of `pdserve bench overhead`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.settings.config import CheckpointConfig, EngineConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds


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
