"""What a role is, what it is given, and what every role refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Puller
from pdserve.clock import Clock
from pdserve.config import NodeConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.engine import Engine, StepObserver
from pdserve.errors import ContextLengthExceeded, InvalidRequest, NoNodeAvailable, PdserveError
from pdserve.metrics import NodeMetrics
from pdserve.node.host_tier import NodeTier
from pdserve.node.legs import Legs
from pdserve.node.link import CoordinatorLink, LegReceiver
from pdserve.node.session_client import Sessions
from pdserve.node.session_server import Announcer
from pdserve.protocol import DecodeLeg, LegFailed, NodeState, PrefillLeg


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What `runtime` builds and a role uses."""

    config: NodeConfig
    node_id: str
    incarnation: str
    clock: Clock
    pool: BlockPool
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    identity: KvIdentity
    exporter: Exporter
    puller: Puller
    metrics: NodeMetrics
    state: Callable[[], NodeState]
    tier: NodeTier | None = None  # without one, evicted prefixes are lost


class Role(LegReceiver, StepObserver, Protocol):
    """A prefill node or a decode node."""

    @property
    def engine(self) -> Engine:
        """Its engine, which the runtime runs."""
        ...

    @property
    def legs(self) -> Legs:
        """Its legs, which a drain waits for."""
        ...

    @property
    def announcer(self) -> Announcer | None:
        """Whom sessions subscribe to; None: nobody pulls from this role."""
        ...

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for others to pull."""
        ...

    @property
    def sessions(self) -> Sessions:
        """Over which it pulls."""
        ...

    @property
    def num_waiting(self) -> int:
        """Legs for which there is no room yet."""
        ...

    async def close(self) -> None:
        """Stop what the role runs besides the engine."""
        ...


def accepts(
    parts: NodeParts, legs: Legs, leg: PrefillLeg | DecodeLeg, link: CoordinatorLink
) -> bool:
    """Whether the leg can be worked on; a leg that cannot is answered here."""
    length = len(leg.token_ids)
    if parts.state() is NodeState.LOADING:
        refuse(leg, link, NoNodeAvailable(f"{parts.node_id} is loading its model"))
    elif leg.request_id in legs:
        refuse(leg, link, InvalidRequest(f"{leg.request_id} is running on {parts.node_id}"))
    elif not 0 < length < parts.max_model_len:
        refuse(
            leg,
            link,
            ContextLengthExceeded(
                f"a prompt of {length} tokens: max_model_len {parts.max_model_len} allows "
                f"1 to {parts.max_model_len - 1}"
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
    elif not 0 <= min(leg.token_ids) <= max(leg.token_ids) < parts.vocab_size:
        refuse(leg, link, InvalidRequest(f"token ids must be in 0..{parts.vocab_size - 1}"))
    else:
        return True
    return False


def refuse(leg: PrefillLeg | DecodeLeg, link: CoordinatorLink, error: PdserveError) -> None:
    """Answer that this leg will not be worked on."""
    link.send(LegFailed(request_id=leg.request_id, code=error.code, message=error.message))
