"""What is sent to gateways that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chats:
    """What is asked for."""

    name: str
    prompt_words: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All of it."""

    cases: Sequence[Chats]
    streams: int  # of the closed loop
    duration_s: float  # of a load
    drain_s: float  # for what still runs when a load is over
    rounds: int
