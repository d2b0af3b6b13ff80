"""The seam between the router and its policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from coordinator.generation import GenerationRequest
from coordinator.registry import Member
from coordinator.routing.slots import Floats, Ints

Job = Literal["prefill", "decode", "local"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ready nodes for one job of one request. What a policy looks at is by slot."""

    job: Job
    request: GenerationRequest
    slots: Ints  # ascending, never empty; the same object until a node joins, leaves or turns
    cost_s: Floats  # what the job is predicted to take: TTFT, TPOT, or a score of both
    load: Ints  # what there is to do already: prompt tokens, or decoding requests
    members: Sequence[Member | None]  # by slot


class Policy(Protocol):
    """Chooses a node. May keep state from one choice to the next, such as whose turn it is."""

    def pick(self, candidates: Candidates) -> int:
        """The slot of one of the candidates."""
        ...
