"""Config of `pdserve bench router`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.settings.struct import ConfigStruct, Count


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
