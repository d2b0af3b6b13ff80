"""Which pairs of nodes fail their handoffs: avoided for a while, then tried again with one request.

A node that its peers cannot reach (a wrong host, a firewall, no descriptors left) fails its
requests fast. So it looks idle, and would be sent everything. Each failure to open a session or to
pull counts against the pair, and twice as long a time passes before it is tried again: by one new
request, whose outcome all others wait for elsewhere; none that has failed already pays twice. A
node that has failed with two peers, and worked with none since, is avoided with all of them.

A decode node also tells when it has no session with a prefill node any more (in its load reports),
so that nobody has to find it out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf

from coordinator.nodes.registry import Member, Registry
from pdserve.protocol import NodeRole
from pdserve.shared.clock import Clock
from pdserve.shared.errors import (
    AccessDenied,
    CorruptTransfer,
    LayoutMismatch,
    PdserveError,
    PeerLost,
    StaleIncarnation,
    TransferTimeout,
    TransportUnavailable,
)

log = logging.getLogger(__name__)

FIRST_S = 1.0  # how long a pair is avoided after its first failure; doubles with each further one
LONGEST_S = 60.0
# How long a request that tries a pair is waited for, unless it fails: longer than it takes to find
# that a session cannot be opened, or has fallen silent. It may have ended without a word.
PROBE_S = 15.0

# Errors of a leg that show that one node cannot pull from the other.
_ABOUT_REACH = (
    PeerLost,
    TransferTimeout,
    AccessDenied,
    CorruptTransfer,
    TransportUnavailable,
    LayoutMismatch,
    StaleIncarnation,  # another process is at its address
)

Pair = tuple[Member, Member]  # (prefill node, decode node)


@dataclass(slots=True)
class PairFailures:
    """The failures of a pair that has not worked since."""

    since_s: float
    code: str  # of the last error
    count: int = 0
    next_try_s: float = 0.0
    is_tried: bool = False  # a request is on its way that may show whether it works again


@dataclass(frozen=True, slots=True)
class Avoided:
    """What is not used now."""

    pairs: frozenset[Pair] = frozenset()
    nodes: frozenset[Member] = frozenset()  # with any peer
    tried: frozenset[Pair] = frozenset()  # except these, whose pause is over

    def allows(self, prefill: Member, decode: Member, *, tries: bool) -> bool:
        """Return whether a request may be handed off, one that `tries` what has failed or not."""
        pair = prefill, decode
        if pair in self.pairs:
            return False
        return tries if pair in self.tried else self.nodes.isdisjoint(pair)


NOTHING = Avoided()


class PairHealth:
    """The pairs that fail. A pair that works, or has never been tried, has no entry."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self.num_failures = 0  # counted, of all pairs
        self._failing: dict[Pair, PairFailures] = {}
        self._worked_s: dict[Member, float] = {}  # while any pair fails: last success of a node
        self._linked: dict[Member, frozenset[Member]] = {}  # where it pulls from, as last reported
        registry.on_changed(self._reported)
        registry.on_lost(self._lost)

    @property
    def num_failing(self) -> int:
        """Number of pairs that have failed and not worked since."""
        return len(self._failing)

    def of(self, member: Member) -> dict[str, PairFailures]:
        """Return the failing pairs of a node, by the other node's id."""
        return {
            (decode if member is prefill else prefill).node_id: failures
            for (prefill, decode), failures in self._failing.items()
            if member in (prefill, decode)
        }

    def next_try_in_s(self, failures: PairFailures) -> float:
        """Return the seconds until the pair may be tried again."""
        return max(0.0, failures.next_try_s - self._clock.now())

    # ---- what happens --------------------------------------------------------------------------

    def sent(self, prefill: Member, decode: Member) -> None:
        """Note that a request was sent to a pair; if it failed before, this one tries it again."""
        failures = self._failing.get((prefill, decode))
        now_s = self._clock.now()
        if failures is not None and failures.next_try_s <= now_s:
            failures.is_tried = True
            failures.next_try_s = now_s + PROBE_S

    def worked(self, prefill: Member, decode: Member) -> None:
        """Note that a request was handed off."""
        if not self._failing:
            return
        self._worked_s[prefill] = self._worked_s[decode] = self._clock.now()
        if self._failing.pop((prefill, decode), None) is not None:
            log.info("%s hands off to %s again", prefill.node_id, decode.node_id)
        if not self._failing:
            self._worked_s.clear()

    def failed(self, prefill: Member, decode: Member, error: PdserveError) -> None:
        """Note that a handoff failed; those sent before the pair was avoided count once."""
        if not isinstance(error, _ABOUT_REACH):
            return
        if prefill not in self._registry or decode not in self._registry:  # its end is the cause
            return
        now_s = self._clock.now()
        failures = self._failing.get((prefill, decode))
        if failures is None:
            failures = self._failing[prefill, decode] = PairFailures(now_s, error.code)
        elif not failures.is_tried:
            return
        failures.code, failures.is_tried = error.code, False
        failures.count += 1
        self.num_failures += 1
        pause_s = _pause_s(failures.count)
        failures.next_try_s = now_s + pause_s
        log.log(
            logging.WARNING if failures.count == 1 else logging.INFO,  # the first one says it all
            "handoffs from %s to %s fail, and are tried again in %g s: %s",
            prefill.node_id,
            decode.node_id,
            pause_s,
            error,
        )

    def _reported(self, member: Member) -> None:
        """Look for sessions that a decode node had when it reported before."""
        found = (self._registry.find(link.peer) for link in member.load.links)
        linked = frozenset(peer for peer in found if peer is not None)
        gone = self._linked.get(member, frozenset()) - linked
        self._linked[member] = linked
        for peer in gone if member.role is NodeRole.DECODE and member.is_ready else ():
            if peer.role is NodeRole.PREFILL and peer.is_ready:
                text = f"{member.node_id} has no session with {peer.node_id} any more"
                self.failed(peer, member, PeerLost(text))

    # ---- what follows --------------------------------------------------------------------------

    def avoided(self) -> Avoided:
        """Return what is avoided now."""
        if not self._failing:
            return NOTHING
        now_s = self._clock.now()
        pairs = frozenset(p for p, failures in self._failing.items() if failures.next_try_s > now_s)
        return Avoided(pairs, self._unreachable(), frozenset(self._failing) - pairs)

    def _unreachable(self) -> frozenset[Member]:
        """Return the nodes that have failed with two peers, and worked with none since."""
        since_s: dict[Member, list[float]] = {}
        for pair, failures in self._failing.items():
            for member in pair:
                since_s.setdefault(member, []).append(failures.since_s)
        return frozenset(
            member
            for member, times_s in since_s.items()
            if len(times_s) > 1 and self._worked_s.get(member, -inf) < min(times_s)
        )

    def _lost(self, member: Member) -> None:
        self._worked_s.pop(member, None)
        self._linked.pop(member, None)
        self._failing = {p: failures for p, failures in self._failing.items() if member not in p}


def _pause_s(num_failures: int) -> float:
    return min(FIRST_S * 2.0 ** min(num_failures - 1, 10), LONGEST_S)
