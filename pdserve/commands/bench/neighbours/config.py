"""Config of `pdserve bench neighbours`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.settings.config import CheckpointConfig, EngineConfig, Mode
from pdserve.settings.struct import ConfigStruct, Count, Seconds


class NeighboursConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench neighbours`."""

    attack: Annotated[
        list[str], Meta(description="attacks, by their names in the table; empty: all")
    ] = msgspec.field(default_factory=list)
    round_s: Annotated[Seconds, Meta(description="time for each attack")] = 4.0
    rate: Annotated[
        float, Meta(gt=0, description="calls per second of the tenant that is attacked")
    ] = 6.0
    mode: Annotated[Mode, Meta(description="as of pdserve up")] = "disaggregated"
    prefill: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="number of prefill nodes")
    ] = None
    decode: Annotated[Count, Meta(description="number of decode nodes")] = 1
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()
