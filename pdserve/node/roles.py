"""The interface of a node's two services, and the parts that they share.

A node can prefill and decode, with one service for each. Its role is a label: it selects the policy
that the engine follows, and tells coordinators which legs to send (`pdserve.node.services`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Puller
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Policy
from pdserve.measured.perf_model import PerfModel
from pdserve.metrics import NodeMetrics
from pdserve.node.adapters import NodeAdapters
from pdserve.node.legs import Legs
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.prefixes.store.node_store import NodeStore
from pdserve.node.preparation import Preparation
from pdserve.node.sessions.client import Sessions
from pdserve.node.sessions.server import Announcer
from pdserve.protocol import DecodeLeg, NodeRole, NodeState, PrefillLeg
from pdserve.settings.config import NodeConfig
from pdserve.shared.clock import Clock
from pdserve.shared.errors import PdserveError


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts that both services share, built by `pdserve.node.assembly`."""

    config: NodeConfig
    node_id: str
    incarnation: str
    clock: Clock
    pool: BlockPool
    engine: Engine
    legs: Legs
    sessions: Sessions  # for pulling KV
    preparation: Preparation  # through which requests reach the engine
    max_model_len: int
    vocab_size: int
    identity: KvIdentity
    exporter: Exporter
    puller: Puller
    metrics: NodeMetrics
    state: Callable[[], NodeState]
    perf: PerfModel  # of steps; a guess until the node has profiled itself
    pull_costs: PullCosts  # compared with those of computing
    headroom: Headroom  # of the pool, for prefixes
    speculation: Speculation
    adapters: NodeAdapters
    tier: NodeTier | None = None  # None: evicted prefixes are lost
    store: NodeStore | None = None  # None: they are lost with the node
    prompt_engine: Engine | None = None  # computes prompts beside `engine`; None: that does both
    short_len: int = 0  # as NodeHello
    no_drafts: str = ""  # as LoadReport
    bound_to: NodeRole | None = None  # whose weights it has, if roles have their own


Sampled: TypeAlias = tuple[Request, SampledToken | None]  # None: a chunk before the last one
Leg = TypeVar("Leg", PrefillLeg, DecodeLeg, contravariant=True)


class Service(Protocol[Leg]):
    """What a node does with one kind of legs. Its methods concern requests of that kind only."""

    @property
    def policy(self) -> Policy:
        """The engine's policy while the node has this role."""
        ...

    @property
    def num_waiting(self) -> int:
        """Legs that wait for room, besides those in the engine's queue."""
        ...

    def start(self, leg: Leg) -> None:
        """Start a leg, which has been checked and added to `parts.legs`."""
        ...

    def cancel(self, request_id: str, reason: str) -> None:
        """A request was cancelled and removed from engine and legs. Unknown ids are ignored."""
        ...

    def add_tokens(self, sampled: Sequence[Sampled], started_s: float) -> None:
        """Add the tokens of a step that began at `started_s` to its messages (`parts.legs`)."""
        ...

    def step_done(self, sampled: Sequence[Sampled]) -> None:
        """The step's messages have been sent: do the remaining work."""
        ...

    def requests_failed(self, requests: Sequence[Request], error: PdserveError) -> None:
        """A step raised, or a deadline has passed. The caller then fails the legs."""
        ...


class DecodeService(Service[DecodeLeg], Protocol):
    """The decode service also serves whole requests."""

    @property
    def phases(self) -> tuple[Policy, Policy]:
        """The policies of engines that compute decodes, and prompts, beside each other.

        Raises:
            ConfigError: the node's policy cannot plan them apart.
        """
        ...

    def coming(self, request_id: str) -> Request | None:
        """The stream of this leg that is being taken over from another node; None: no such."""
        ...


class PrefillService(Service[PrefillLeg], Protocol):
    """The prefill service also announces KV, even while a step runs."""

    @property
    def announcer(self) -> Announcer:
        """What sessions of other nodes subscribe to."""
        ...

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for others to pull."""
        ...

    def leaving(self, request_id: str) -> Request | None:
        """The stream of this id that is being taken over, until its taker has it; None: no such."""
        ...

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """As StepObserver.step_planned, for all rows of the step."""
        ...

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """As StepObserver.layers_done, for all rows of the step."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceFactories:
    """Constructors of the services, whose packages do not import each other."""

    prefill: Callable[[NodeParts], PrefillService]
    decode: Callable[[NodeParts], DecodeService]
