"""What a node's two services are, what they are given, and which legs a node refuses.

A node prefills and decodes, with one service for each. Its role is a label: it says whose policy
the engine follows, and which legs coordinators send (`pdserve.node.services`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Puller
from pdserve.clock import Clock
from pdserve.config import NodeConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Policy
from pdserve.errors import ContextLengthExceeded, InvalidRequest, NoNodeAvailable, PdserveError
from pdserve.metrics import NodeMetrics
from pdserve.node.cost import Costs
from pdserve.node.host_tier import NodeTier
from pdserve.node.legs import Legs
from pdserve.node.link import CoordinatorLink
from pdserve.node.prefix_queue import PrefixQueue
from pdserve.node.session_client import Sessions
from pdserve.node.session_server import Announcer
from pdserve.perf_model import PerfModel
from pdserve.protocol import DecodeLeg, LegFailed, NodeState, PrefillLeg


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What both services share, each of them once (`pdserve.node.assembly`)."""

    config: NodeConfig
    node_id: str
    incarnation: str
    clock: Clock
    pool: BlockPool
    engine: Engine
    legs: Legs
    sessions: Sessions  # over which KV is pulled
    prefixes: PrefixQueue  # through which prompts reach the engine
    max_model_len: int
    vocab_size: int
    identity: KvIdentity
    exporter: Exporter
    puller: Puller
    metrics: NodeMetrics
    state: Callable[[], NodeState]
    perf: PerfModel  # a guess until the node has profiled itself
    costs: Costs  # of pulls, and again of steps
    tier: NodeTier | None = None  # without one, evicted prefixes are lost


Sampled: TypeAlias = tuple[Request, SampledToken | None]  # None: its row reached no token
Leg = TypeVar("Leg", PrefillLeg, DecodeLeg, contravariant=True)


class Service(Protocol[Leg]):
    """What a node does for one kind of legs. It is told of its own requests only."""

    @property
    def policy(self) -> Policy:
        """What the engine follows while the node has this role."""
        ...

    @property
    def num_waiting(self) -> int:
        """Legs for which there is no room yet, besides those in the engine's queue."""
        ...

    def start(self, leg: Leg) -> None:
        """Begin a leg, which has been looked at and is among `parts.legs`."""
        ...

    def cancel(self, request_id: str, reason: str) -> None:
        """A request, which may be another service's or unknown, has left engine and legs."""
        ...

    def add_tokens(self, sampled: Sequence[Sampled], started_s: float) -> None:
        """Put what a step, begun then, has sampled into its messages (`Legs.add_event`)."""
        ...

    def step_done(self, sampled: Sequence[Sampled]) -> None:
        """The step's messages are on their way: do the rest."""
        ...

    def requests_failed(self, requests: Sequence[Request], error: PdserveError) -> None:
        """A step raised, or their deadline has passed; their legs are failed after this."""
        ...

    async def close(self) -> None:
        """Stop what runs besides the engine."""
        ...


class PrefillService(Service[PrefillLeg], Protocol):
    """It also hands KV over, from the middle of a step on."""

    @property
    def announcer(self) -> Announcer:
        """Whom sessions subscribe to."""
        ...

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for others to pull."""
        ...

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """As StepObserver.step_planned; of all rows."""
        ...

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """As StepObserver.layers_done; of all rows."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceFactories:
    """How a node's services are made; the packages that have them know nothing of each other."""

    prefill: Callable[[NodeParts], PrefillService]
    decode: Callable[[NodeParts], Service[DecodeLeg]]


def accepts(parts: NodeParts, leg: PrefillLeg | DecodeLeg, link: CoordinatorLink) -> bool:
    """Whether the leg can be worked on; a leg that cannot is answered here."""
    length = len(leg.token_ids)
    if parts.state() is NodeState.LOADING:
        refuse(leg, link, NoNodeAvailable(f"{parts.node_id} is loading its model"))
    elif known := [request_id for request_id in leg.request_ids if request_id in parts.legs]:
        refuse(leg, link, InvalidRequest(f"{known[0]} is running on {parts.node_id}"))
    elif not 0 < length <= parts.max_model_len:
        refuse(
            leg,
            link,
            ContextLengthExceeded(
                f"a prompt of {length} tokens: max_model_len {parts.max_model_len} allows "
                f"1 to {parts.max_model_len}"
            ),
        )
    elif length + leg.sampling.max_tokens > parts.max_model_len:
        refuse(  # it might outgrow the pool, and then wait for room that cannot be
            leg,
            link,
            ContextLengthExceeded(
                f"{length} prompt tokens and max_tokens {leg.sampling.max_tokens} are more than "
                f"max_model_len {parts.max_model_len}"
            ),
        )
    elif isinstance(leg, PrefillLeg) and leg.siblings and leg.sampling.max_tokens == 0:
        refuse(leg, link, InvalidRequest("a request without output cannot have several answers"))
    elif not 0 <= min(leg.token_ids) <= max(leg.token_ids) < parts.vocab_size:
        refuse(leg, link, InvalidRequest(f"token ids must be in 0..{parts.vocab_size - 1}"))
    else:
        return True
    return False


def refuse(leg: PrefillLeg | DecodeLeg, link: CoordinatorLink, error: PdserveError) -> None:
    """Answer that this leg will not be worked on."""
    link.send(LegFailed(request_id=leg.request_id, code=error.code, message=error.message))
