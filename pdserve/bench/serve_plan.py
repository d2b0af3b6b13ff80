"""What is sent to servers that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` streams or, if that is 0, an open one at `rate`."""

    concurrency: int = 0
    rate: float = 0.0  # requests a second

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent."""

    loads: Sequence[Load]
    prompt_tokens: int
    output_tokens: int
    num_requests: int  # of a round; 0: what the load suggests
    rounds: int
    seed: int
    round_s: float  # for a round of a closed loop; for an open one, after its last arrival
