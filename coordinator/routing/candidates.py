"""The interfaces between the router and its policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.prefixes.index import Hits
from coordinator.routing.loads.slots import Floats, Ints
from coordinator.routing.placement import Placement
from coordinator.routing.sides import OnOneNode
from pdserve.protocol import Slo

Job = Literal["prefill", "decode", "local"]


class Candidates(NamedTuple):
    """Ready nodes for one job of one request. Costs, loads and members are by slot."""

    job: Job
    request: GenerationRequest
    slots: Ints  # ascending, never empty; same object until a node joins, leaves or changes pools
    cost_s: Floats  # predicted cost of the job: TTFT, TPOT, or a score of both
    load: Ints  # work in flight: prompt tokens, or decoding requests
    members: Sequence[Member | None]  # by slot
    hits: Hits  # which nodes hold how much of the prompt


@runtime_checkable
class RoutingPolicy(Protocol):
    """Chooses a node. May keep state between choices, such as the next node of a round robin."""

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        ...


@runtime_checkable
class SidesPolicy(Protocol):
    """A policy that also decides in adaptive mode whether a request is handed off."""

    def choose(self, slo: Slo, pair: Placement, one: OnOneNode) -> Placement:
        """Return `pair`, a handoff, or the placement of `one`, a node for all of the request."""
        ...
