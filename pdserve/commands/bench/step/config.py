"""Config of `pdserve bench step`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.commands.bench.step.cases import Grid
from pdserve.settings.config import EngineConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.shared.errors import ConfigError

_QUICK_BATCHES = (1, 16)
_QUICK_CONTEXT = 1024  # tokens
_QUICK_PROMPT = 512  # tokens
_QUICK_BUDGET_S = 20.0


class StepBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench step`."""

    shape: Annotated[
        str,
        Meta(description="a named shape with random weights, a checkpoint directory or GGUF file"),
    ] = "160m"
    batches: Annotated[list[Count], Meta(description="decode batch sizes")] = msgspec.field(
        default_factory=lambda: [1, 4, 16, 64]
    )
    contexts: Annotated[
        list[Count], Meta(description="context lengths of decode steps, tokens")
    ] = msgspec.field(default_factory=lambda: [128, 1024, 4096])
    prompts: Annotated[
        list[Count], Meta(description="prompt lengths, each computed in one step")
    ] = msgspec.field(default_factory=lambda: [128, 512, 2048, 4096])
    budget_s: Annotated[Seconds, Meta(description="time to measure for; at least three rounds")] = (
        90.0
    )
    quick: Annotated[
        bool, Meta(description="batches 1 and 16, contexts up to 1024, prompts of 512; 20 s")
    ] = False
    beside: Annotated[
        int,
        Meta(ge=0, description="also measure beside this many processes, each half of a core busy"),
    ] = 0
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = EngineConfig()

    @property
    def grid(self) -> Grid:
        """What to measure, if there is room.

        Raises:
            ConfigError: a quick run leaves nothing.
        """
        if not self.quick:
            return Grid(self.batches, self.contexts, self.prompts)
        grid = Grid(
            [batch for batch in self.batches if batch in _QUICK_BATCHES],
            [context for context in self.contexts if context <= _QUICK_CONTEXT],
            [tokens for tokens in self.prompts if tokens == _QUICK_PROMPT],
        )
        if not list(grid.cases()):
            raise ConfigError("--quick measures none of these batches, contexts and prompts")
        return grid

    @property
    def seconds(self) -> float:
        """For measuring."""
        return min(self.budget_s, _QUICK_BUDGET_S) if self.quick else self.budget_s
