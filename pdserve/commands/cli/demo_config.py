"""Config of `pdserve demo`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.settings.config import CheckpointConfig, EngineConfig
from pdserve.settings.flag_groups import DEMO
from pdserve.settings.struct import ConfigStruct, Count, Seconds

_PROMPTS = (
    "What is 12 plus 30?",
    "What is the capital of France?",
    "Tell me a story about a fox and a hen.",
)


class DemoConfig(ConfigStruct, frozen=True):
    """One prefill and one decode node, and some questions."""

    flag_groups = DEMO

    prompt: Annotated[str, Meta(description="question to ask; empty: three built-in ones")] = ""
    max_tokens: Annotated[Count, Meta(description="maximum output tokens per answer")] = 128
    deadline_s: Annotated[Seconds, Meta(description="deadline for the whole demo")] = 300.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is asked, one after the other."""
        return (self.prompt,) if self.prompt else _PROMPTS
