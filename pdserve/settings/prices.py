"""What the tokens of a model cost those who ask it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct

_Amount = Annotated[float, Meta(ge=0, le=1e9)]
_MILLION = 1e6


class Price(ConfigStruct, frozen=True):
    """The price of a million tokens of each kind, in any currency."""

    input: _Amount = 0.0
    cached_input: _Amount | None = None  # None: as other input
    output: _Amount = 0.0

    def of(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Return what so many tokens cost; cached ones are of the prompt's."""
        cached = self.input if self.cached_input is None else self.cached_input
        uncached_tokens = prompt_tokens - cached_tokens
        total = self.input * uncached_tokens + cached * cached_tokens + self.output * output_tokens
        return total / _MILLION
