"""What `pdserve demo` can be told."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.config import ConfigStruct, Count, EngineConfig, ModelConfig, Seconds

_PROMPTS = (
    "What is 12 plus 30?",
    "What is the capital of France?",
    "Tell me a story about a fox and a hen.",
)


class DemoConfig(ConfigStruct, frozen=True):
    """A cluster of one prefill and one decode node, asked a question or two."""

    prompt: Annotated[
        str, Meta(description="what to ask; empty: a sum, a question and a story")
    ] = ""
    max_tokens: Annotated[Count, Meta(description="most output tokens of an answer")] = 128
    deadline_s: Annotated[Seconds, Meta(description="for all of it")] = 300.0
    checkpoint: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is asked, one after the other."""
        return (self.prompt,) if self.prompt else _PROMPTS
