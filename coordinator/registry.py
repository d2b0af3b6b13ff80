"""Which nodes are members, and what this coordinator knows of each.

A node is a member from its hello until its stream breaks. The same node id with another incarnation
is another life of the process: the former one is lost at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from pdserve.introduction import introduce
from pdserve.protocol import LoadReport, NodeAddress, NodeHello, NodeRole, NodeState
from pdserve.wire.outbox import Outbox

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One life of one node."""

    hello: NodeHello
    outbox: Outbox
    load: LoadReport
    pending_prompts: dict[str, int] = field(default_factory=dict)  # request_id |-> prompt tokens
    decoding: set[str] = field(default_factory=set)  # request ids of decode legs

    @property
    def node_id(self) -> str:
        """Its name; the same over all its lives."""
        return self.hello.node_id

    @property
    def role(self) -> NodeRole:
        """Which pool it works for now."""
        return self.load.role

    @property
    def is_ready(self) -> bool:
        """Whether it takes new legs."""
        return self.load.state is NodeState.READY

    def address_for(self, puller: Member) -> NodeAddress:
        """Where this life of the node exports its KV, opened for that life of a puller."""
        hello = self.hello
        return NodeAddress(
            node_id=hello.node_id,
            incarnation=hello.incarnation,
            session_address=hello.session_address,
            introduction=introduce(
                hello.introduction_key, hello.incarnation, puller.hello.incarnation
            ),
        )

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens sent there that have not led to a first token yet."""
        return sum(self.pending_prompts.values())

    def send(self, message: msgspec.Struct) -> None:
        """Send to the node; never blocks."""
        self.outbox.send(message)


class Registry:
    """All members, by node id."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._on_lost: list[Callable[[Member], None]] = []

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, member: Member) -> bool:
        """Whether this life of a node is a member: it may have been superseded or lost."""
        return self._members.get(member.node_id) is member

    def on_lost(self, listener: Callable[[Member], None]) -> None:
        """Call `listener` with every member that is lost."""
        self._on_lost.append(listener)

    def add(self, hello: NodeHello, outbox: Outbox) -> Member:
        """A node said hello."""
        former = self._members.get(hello.node_id)
        if former is not None:
            self.remove(former)
        member = Member(hello, outbox, LoadReport(state=hello.state, role=hello.role))
        self._members[hello.node_id] = member
        log.info("%s joined (%s, incarnation %s)", *_names(member), hello.incarnation)
        return member

    def remove(self, member: Member) -> None:
        """A node's stream broke; harmless when this life of it is gone already."""
        if member not in self:
            return
        del self._members[member.node_id]
        if member.load.state is NodeState.DRAINING:
            log.info("%s has drained (%s)", *_names(member))
        else:
            log.warning("%s is gone (%s)", *_names(member))
        for listener in self._on_lost:
            listener(member)

    def ready(self, role: NodeRole) -> list[Member]:
        """Members of a pool that take new legs."""
        return [m for m in self if m.role is role and m.is_ready]


def _names(member: Member) -> tuple[str, str]:
    return member.node_id, member.role.name.lower()
