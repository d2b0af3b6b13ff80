"""Which nodes are members, and what this coordinator knows about each.

A node is a member from its hello until its stream breaks. When it attaches anew before that is
noticed, the former member is removed at that moment.

Each member has a *slot*: a small integer that is reused after the member is lost. State that is
needed for all members at once is kept in arrays by slot (`coordinator/routing`, `prefixes`).

What several coordinators of the same nodes have together, each takes its part of. Nodes report how
many coordinators they are attached to. So places in the line and quotas are divided by their number
within a heartbeat of a coordinator's coming or going, and no store is asked for a request. Clients
are spread evenly by whatever stands in front of the coordinators.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

import msgspec

from coordinator.generation import Needs
from pdserve.protocol import (
    AdapterReport,
    Drain,
    LoadReport,
    NodeAddress,
    NodeHello,
    NodeRole,
    NodeState,
    PerfReport,
    TransportReach,
)
from pdserve.shared.introduction import introduce
from pdserve.wire.outbox import Outbox

log = logging.getLogger(__name__)

_MOST_OFFSETS = 20  # of the last reports: ten seconds of heartbeats


class ClockOffset:
    """How far a node's clock is ahead of ours, as its reports tell.

    Nothing depends on it but logs, traces and certificates.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._measured: deque[float] = deque(maxlen=_MOST_OFFSETS)

    def heard(self, sent_at: float) -> None:
        """A report has come, sent at that time of the node, in seconds since 1970; 0: not told."""
        if sent_at:
            self._measured.append(sent_at - self._now())

    @property
    def ms(self) -> float | None:
        """Milliseconds that the node is ahead; None: it has not told.

        It is too small by the time that the fastest of the reports was on its way.
        """
        return max(self._measured) * 1e3 if self._measured else None


class Shares:
    """Tells `listeners` the number of coordinators whenever it changes; it is 1 at first."""

    def __init__(self, registry: Registry, listeners: Sequence[Callable[[int], None]]) -> None:
        self._registry = registry
        self._listeners = listeners
        self._number = 1
        registry.on_changed(self._look)
        registry.on_lost(self._look)

    def _look(self, _: Member) -> None:
        number = self._registry.num_coordinators
        if number == self._number:
            return
        self._number = number
        log.info("%d coordinators share the nodes, and places in line and quotas", number)
        for listener in self._listeners:
            listener(number)


KvReach: TypeAlias = tuple[str, TransportReach]
"""The KV of a revision, and the nodes that one transport of its holder reaches."""


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of one node."""

    hello: NodeHello
    outbox: Outbox
    load: LoadReport
    slot: int = 0  # unique among members
    perf: PerfReport | None = None  # None: the node has not reported its profile yet
    is_told_to_drain: bool = False  # it may not have said yet that it does
    is_silent: bool = False  # nothing was heard for `liveness_s`: it is late, or was when it went
    reaches: frozenset[KvReach] = field(init=False)
    clock: ClockOffset = field(default_factory=ClockOffset)
    adapters: frozenset[str] = frozenset()  # digests of those that it has said it has
    most_adapters: int = 0  # that it keeps at a time

    def __post_init__(self) -> None:
        """Make the set of transports, which is compared with that of other nodes."""
        hello = self.hello
        self.reaches = frozenset((hello.revision, reach) for reach in hello.transports)

    @property
    def node_id(self) -> str:
        """The node's name; the same for all its incarnations."""
        return self.hello.node_id

    @property
    def role(self) -> NodeRole:
        """The pool that the node works for now."""
        return self.load.role

    @property
    def is_ready(self) -> bool:
        """Whether the node accepts new legs."""
        return self.load.state is NodeState.READY

    @property
    def is_standby(self) -> bool:
        """Whether the node has loaded, and waits to be given a pool."""
        return self.load.state is NodeState.LOADING and self.load.is_standby

    @property
    def exports_kv(self) -> bool:
        """Whether others can pull KV from the node: also while it drains."""
        return self.load.state in (NodeState.READY, NodeState.DRAINING)

    def serves(self, needs: Needs) -> bool:
        """Return whether the node may get a request of these needs, once it is ready."""
        has_adapter = not needs.adapter or needs.adapter in self.adapters
        return has_adapter and needs.revision in ("", self.hello.revision)

    def exchanges_kv(self, other: Member) -> bool:
        """Return whether KV can move between the two nodes: of one revision, by one transport."""
        return not self.reaches.isdisjoint(other.reaches)

    def address_for(self, puller: Member) -> NodeAddress:
        """Return where this incarnation exports its KV, with an introduction for `puller`'s."""
        hello = self.hello
        return NodeAddress(
            node_id=hello.node_id,
            incarnation=hello.incarnation,
            session_address=hello.session_address,
            introduction=introduce(
                hello.introduction_key, hello.incarnation, puller.hello.incarnation
            ),
        )

    def drain(self, become: str = "") -> None:
        """Have the node end when its legs have; `become`: to be one of that model then."""
        self.is_told_to_drain = True
        self.send(Drain(become=become))

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the node; never blocks."""
        self.outbox.send(message)


Listener = Callable[[Member], None]


class Registry:
    """All members, by node id. Listeners are called in the order in which they were added."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._free_slots: list[int] = []  # heap of free slots below `_num_slots`
        self._num_slots = 0
        self._on_joined: list[Listener] = []
        self._on_changed: list[Listener] = []
        self._on_lost: list[Listener] = []
        self._on_refused: list[Callable[[str, str], None]] = []

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, member: Member) -> bool:
        """Return whether this incarnation is a member: it may have been replaced or lost."""
        return self._members.get(member.node_id) is member

    @property
    def num_members(self) -> int:
        """Number of members, whatever their state."""
        return len(self._members)

    @property
    def num_coordinators(self) -> int:
        """Number of coordinators that use these nodes, as far as a node has told."""
        return max((member.load.num_coordinators for member in self), default=1) or 1

    def are_led_by(self, incarnation: str) -> bool:
        """Return whether this coordinator may do what only one of those of these nodes may do.

        Each node names the first of the coordinators that it is attached to. All members have to
        name the same one: so two coordinators that share a node never both lead.
        """
        leaders = {m.load.leader for m in self if m.load.leader or m.load.num_coordinators > 1}
        return leaders <= {incarnation}

    def find(self, node_id: str) -> Member | None:
        """Return the member with this node id, if there is one."""
        return self._members.get(node_id)

    def on_joined(self, listener: Listener) -> None:
        """Call `listener` with every member that has joined, before it is told as changed."""
        self._on_joined.append(listener)

    def on_changed(self, listener: Listener) -> None:
        """Call `listener` with every member that has joined or sent a new report."""
        self._on_changed.append(listener)

    def on_lost(self, listener: Listener) -> None:
        """Call `listener` with every member that is lost, before its slot can be reused."""
        self._on_lost.append(listener)

    def on_refused(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener` with the node id of every node that is not let in, and the reason."""
        self._on_refused.append(listener)

    def refused(self, node_id: str, reason: str) -> None:
        """Tell that a node is not let in."""
        for listener in self._on_refused:
            listener(node_id, reason)

    def add(self, hello: NodeHello, outbox: Outbox) -> Member:
        """Add the node that sent `hello`; a former member with its node id is removed."""
        if (former := self.find(hello.node_id)) is not None:
            self.remove(former)
        load = LoadReport(state=hello.state, role=hello.role, free_blocks=hello.num_blocks)
        member = Member(hello, outbox, load, self._take_slot())
        self._members[hello.node_id] = member
        log.info("%s joined (%s, incarnation %s)", *_names(member), hello.incarnation)
        self._tell(self._on_joined, member)
        self._tell(self._on_changed, member)
        return member

    def remove(self, member: Member) -> None:
        """Remove a member whose stream broke; does nothing if it is no member any more."""
        if member not in self:
            return
        del self._members[member.node_id]
        if member.load.state is NodeState.DRAINING:
            log.info("%s has drained (%s)", *_names(member))
        else:
            log.warning("%s is gone (%s)", *_names(member))
        self._tell(self._on_lost, member)
        heappush(self._free_slots, member.slot)

    def silent(self, member: Member, silent_s: float) -> None:
        """Note that nothing has been heard of a member for too long; it may be late, or gone."""
        if not member.is_silent:
            member.is_silent = True
            log.warning("%s (%s) has said nothing for %.1f s", *_names(member), silent_s)
            self._tell(self._on_changed, member)

    def heard(self, member: Member) -> None:
        """Note that a member has said something."""
        if member.is_silent:
            member.is_silent = False
            log.warning("%s (%s) was only late, and goes on", *_names(member))
            self._tell(self._on_changed, member)

    def report(self, member: Member, load: LoadReport) -> None:
        """Record a member's load report."""
        member.load = load
        member.clock.heard(load.sent_at)
        self._tell(self._on_changed, member)

    def profiled(self, member: Member, perf: PerfReport) -> None:
        """Record a member's performance profile."""
        member.perf = perf
        self._tell(self._on_changed, member)

    def has_adapters(self, member: Member, report: AdapterReport) -> None:
        """Record which adapters a member has."""
        member.adapters, member.most_adapters = frozenset(report.digests), report.most
        self._tell(self._on_changed, member)

    def ready(self, role: NodeRole) -> list[Member]:
        """Return the members of a pool that accept new legs."""
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
