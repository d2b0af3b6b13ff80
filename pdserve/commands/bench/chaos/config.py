"""Config of `pdserve bench chaos`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.settings.config import CheckpointConfig, EngineConfig, Mode
from pdserve.settings.struct import ConfigStruct, Count, Seconds


class ChaosConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench chaos`."""

    faults: Annotated[Count, Meta(description="number of faults")] = 20
    seed: Annotated[int, Meta(ge=0, description="of calls and faults")] = 0
    only: Annotated[
        list[str], Meta(description="kinds of faults, by their names in the table; empty: all")
    ] = msgspec.field(default_factory=list)
    calls: Annotated[Count, Meta(description="calls at a time")] = 8
    pause_s: Annotated[Seconds, Meta(description="from the end of a fault to the next one")] = 1.0
    mode: Annotated[Mode, Meta(description="as of pdserve up")] = "disaggregated"
    prefill: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="number of prefill nodes")
    ] = 2
    decode: Annotated[Count, Meta(description="number of decode nodes")] = 2
    json: Annotated[bool, Meta(description="print JSON, with every call and fault")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()
