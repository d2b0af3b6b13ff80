"""Which nodes are members, and what this coordinator knows of each.

A node is a member from its hello until its stream breaks. The same node id with another incarnation
is another life of the process: the former one is lost at that moment.

Members have *slots*: small numbers, given again when their holder has gone. What there is to know
of all members at once stands in arrays by slot (`coordinator/routing`, `prefix_index.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec

from pdserve.introduction import introduce
from pdserve.protocol import (
    LoadReport,
    NodeAddress,
    NodeHello,
    NodeRole,
    NodeState,
    PerfReport,
)
from pdserve.wire.outbox import Outbox

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One life of one node."""

    hello: NodeHello
    outbox: Outbox
    load: LoadReport
    slot: int = 0  # unique among members
    perf: PerfReport | None = None  # None: it has not said yet what it can do

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

    def send(self, message: msgspec.Struct) -> None:
        """Send to the node; never blocks."""
        self.outbox.send(message)


Listener = Callable[[Member], None]


class Registry:
    """All members, by node id. Listeners are called in the order in which they came."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._free_slots: list[int] = []  # a heap: of those below `_num_slots`
        self._num_slots = 0
        self._on_changed: list[Listener] = []
        self._on_lost: list[Listener] = []

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, member: Member) -> bool:
        """Whether this life of a node is a member: it may have been superseded or lost."""
        return self._members.get(member.node_id) is member

    def on_changed(self, listener: Listener) -> None:
        """Call `listener` with every member that has joined, or said something new of itself."""
        self._on_changed.append(listener)

    def on_lost(self, listener: Listener) -> None:
        """Call `listener` with every member that is lost; its slot is still its own then."""
        self._on_lost.append(listener)

    def add(self, hello: NodeHello, outbox: Outbox) -> Member:
        """A node said hello."""
        former = self._members.get(hello.node_id)
        if former is not None:
            self.remove(former)
        load = LoadReport(state=hello.state, role=hello.role, free_blocks=hello.num_blocks)
        member = Member(hello, outbox, load, self._take_slot())
        self._members[hello.node_id] = member
        log.info("%s joined (%s, incarnation %s)", *_names(member), hello.incarnation)
        self._tell(self._on_changed, member)
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
        self._tell(self._on_lost, member)
        heappush(self._free_slots, member.slot)

    def report(self, member: Member, load: LoadReport) -> None:
        """A member has said how it is doing."""
        member.load = load
        self._tell(self._on_changed, member)

    def profiled(self, member: Member, perf: PerfReport) -> None:
        """A member has said what it can do."""
        member.perf = perf
        self._tell(self._on_changed, member)

    def ready(self, role: NodeRole) -> list[Member]:
        """Members of a pool that take new legs."""
        return [m for m in self if m.role is role and m.is_ready]

    def _take_slot(self) -> int:
        if self._free_slots:
            return heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def _tell(self, listeners: list[Listener], member: Member) -> None:
        for listener in listeners:
            listener(member)


def _names(member: Member) -> tuple[str, str]:
    return member.node_id, member.role.name.lower()
