"""The load that measured gateways get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.serve.plan import Load


@dataclass(frozen=True, slots=True)
class Chats:
    """The requests of a load, and how often they are sent."""

    prompt_words: int
    output_tokens: int
    load: Load

    def __str__(self) -> str:
        return f"answers of {self.output_tokens}, {self.load}"


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All loads of a measurement."""

    cases: Sequence[Chats]
    duration_s: float  # of a load
    drain_s: float  # time for running requests after a load
    rounds: int
