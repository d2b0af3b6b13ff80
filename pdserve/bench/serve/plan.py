"""The load that measured servers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` streams or, if that is 0, an open loop at `rate`."""

    concurrency: int = 0
    rate: float = 0.0  # requests per second

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The load of a measurement."""

    loads: Sequence[Load]
    prompt_tokens: int
    output_tokens: int
    num_requests: int  # per round; 0: derived from the load
    rounds: int
    seed: int
    round_s: float  # limit of a closed-loop round; of an open-loop one, after its last arrival
