"""What is sent to gateways that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.serve_plan import Load


@dataclass(frozen=True, slots=True)
class Chats:
    """What is asked for, and how often."""

    prompt_words: int
    output_tokens: int
    load: Load

    def __str__(self) -> str:
        return f"answers of {self.output_tokens}, {self.load}"


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All of it."""

    cases: Sequence[Chats]
    duration_s: float  # of a load
    drain_s: float  # for what still runs when a load is over
    rounds: int
