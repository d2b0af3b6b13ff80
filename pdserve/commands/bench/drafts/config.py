"""Config of `pdserve bench drafts`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from pdserve.settings.config import EngineConfig, ProfileConfig
from pdserve.settings.struct import ConfigStruct, Count

TextSet = Literal["summaries", "edits", "retrieval", "agents", "random", "dice"]


class DraftsBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench drafts`."""

    shape: Annotated[
        str,
        Meta(
            description="a named shape, whose answers are played from the texts, or a checkpoint "
            "directory or GGUF file, which says its own"
        ),
    ] = "160m"
    texts: Annotated[
        list[TextSet],
        Meta(
            description="summaries, edits, retrieval: copied from the prompt; agents: said before; "
            "random: any ids; dice: any of a few"
        ),
    ] = msgspec.field(default_factory=lambda: list(get_args(TextSet)))
    batches: Annotated[list[Count], Meta(description="streams at a time")] = msgspec.field(
        default_factory=lambda: [1, 4, 16, 64]
    )
    tokens: Annotated[Count, Meta(description="of each answer, at most")] = 128
    rounds: Annotated[
        Count, Meta(description="of each case, both ways; the interval needs 6 or more")
    ] = 8
    histories: Annotated[
        list[Count], Meta(description="tokens of text in which drafts are looked up")
    ] = msgspec.field(default_factory=lambda: [1_000, 10_000, 100_000])
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = EngineConfig()
    profile: ProfileConfig = ProfileConfig()
