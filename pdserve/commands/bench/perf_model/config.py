"""Config of `pdserve bench perf-model`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.settings.config import CheckpointConfig, EngineConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds


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
