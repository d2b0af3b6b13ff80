"""The interface between the router and its policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.routing.loads.slots import Floats, Ints

Job = Literal["prefill", "decode", "local"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ready nodes for one job of one request. Costs, loads and members are by slot."""

    job: Job
    request: GenerationRequest
    slots: Ints  # ascending, never empty; same object until a node joins, leaves or changes pools
    cost_s: Floats  # predicted cost of the job: TTFT, TPOT, or a score of both
    load: Ints  # work in flight: prompt tokens, or decoding requests
    members: Sequence[Member | None]  # by slot


@runtime_checkable
class RoutingPolicy(Protocol):
    """Chooses a node. May keep state between choices, such as the next node of a round robin."""

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        ...
