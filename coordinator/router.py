"""Which nodes a request runs on: the least loaded of each pool.

Load is what this coordinator has sent there and not seen the end of, which is known without delay,
or what the node last reported, when that is more: other coordinators send there too.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.registry import Member, Registry
from pdserve.config import Mode
from pdserve.errors import NoNodeAvailable
from pdserve.protocol import NodeRole


@dataclass(frozen=True, slots=True)
class Pair:
    """Who prefills and who decodes; at least one of them."""

    prefill: Member | None
    decode: Member | None


class LeastLoaded:
    """Prefill by pending prompt tokens, decode by requests, both as of now."""

    def __init__(self, registry: Registry, mode: Mode) -> None:
        self.mode = mode
        self._registry = registry
        self._colocated = mode == "colocated"

    def choose(self, max_tokens: int) -> Pair:
        """Nodes for a request; one that wants a single token needs no decode node.

        Raises:
            NoNodeAvailable: a pool that it needs has no ready node; says which.
        """
        if self._colocated:
            return Pair(None, self._decode())
        return Pair(self._prefill(), self._decode() if max_tokens > 1 else None)

    def can_route(self) -> bool:
        """Whether every pool has a ready node."""
        needed = [NodeRole.DECODE] if self._colocated else list(NodeRole)
        return all(self._registry.ready(role) for role in needed)

    def _prefill(self) -> Member:
        def load(member: Member) -> int:
            return max(member.pending_tokens, member.load.queued_tokens)

        return min(self._ready(NodeRole.PREFILL), key=load)

    def _decode(self) -> Member:
        def load(member: Member) -> tuple[int, int]:
            reported = member.load.running_requests + member.load.waiting_requests
            return max(len(member.decoding), reported), -member.load.free_blocks

        return min(self._ready(NodeRole.DECODE), key=load)

    def _ready(self, role: NodeRole) -> list[Member]:
        ready = self._registry.ready(role)
        if not ready:
            attached = sum(1 for m in self._registry if m.role is role)
            raise NoNodeAvailable(
                f"no {role.name.lower()} node is ready ({attached} attached): try again shortly"
            )
        return ready
