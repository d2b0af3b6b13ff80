"""The requests on the nodes: a bound on how many a tenant may have, and which classes are present.

Other requests leave classes with promises their slack while these are present. The last part of a
promise's slack is reserved for the first class: the one with the highest priority, and among equals
the one with the fewest requests on the nodes relative to its weight. So a flood of one class is
refused a little earlier than the occasional requests of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from coordinator.admission.waiting_line import MOST_TIMES_FREE
from pdserve.protocol import Slo


class InFlight:
    """Request ids by tenant. A request without a tenant counts only in total."""

    def __init__(self, most: int) -> None:
        """`most`: limit on all requests together."""
        self.most = most
        self._tenants: dict[str, str] = {}  # request id |-> tenant
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, request_ids: Iterable[str], tenant: str) -> None:
        """Count requests that have been sent to nodes, or will be without a further decision."""
        for request_id in request_ids:
            if request_id not in self._tenants:
                self._tenants[request_id] = tenant
                self._num_of[tenant] += 1

    def remove(self, request_id: str) -> None:
        """Count a request no more; does nothing if it is not counted."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is not None:
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def has_place(self, num_answers: int, tenant: str) -> bool:
        """Return whether so many more requests may be sent to nodes for this tenant."""
        fits = len(self) + num_answers <= self.most
        return fits and not self.is_at_bound(num_answers, tenant)

    def is_at_bound(self, num_answers: int, tenant: str) -> bool:
        """Return whether the tenant has too many there for so many more.

        The more it has, the more places must be left free for others, as in the waiting line. One
        that has none may take any place, so that every call has its turn.
        """
        num_had = self._num_of[tenant] if tenant else 0
        num_free = max(0, self.most - len(self) - num_answers)
        return num_had > 0 and num_had + num_answers > MOST_TIMES_FREE * num_free


RESERVED_SHARE = 0.1  # share of the slack for the first class
PRESENCE_S = 2.0  # a class counts as present for this long after it was last seen


@dataclass(slots=True)
class _Class:
    slo: Slo
    last_seen_s: float
    num_inflight: int = 0

    def goes_before(self, other: _Class) -> bool:
        """Return whether this class has precedence over `other` for the reserved slack."""
        if self.slo.priority != other.slo.priority:
            return self.slo.priority > other.slo.priority
        return self.num_inflight / self.slo.weight < other.num_inflight / other.slo.weight


class Presence:
    """Requests on the nodes and the time of the last request, by class and tenant."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, str], _Class] = {}

    def seen(self, slo: Slo, now_s: float) -> None:
        """Record that a request of this class has arrived, whether it is admitted or not."""
        entry = self._of(slo, now_s)
        entry.last_seen_s = now_s
        if slo.ttft_s > entry.slo.ttft_s:  # less time has passed: nearer to the full promise
            entry.slo = slo

    def dispatched(self, slo: Slo, now_s: float) -> None:
        """Count one more request of the class on the nodes."""
        self._of(slo, now_s).num_inflight += 1

    def ended(self, slo: Slo, now_s: float) -> None:
        """Count one request of the class less on the nodes."""
        self._of(slo, now_s).num_inflight -= 1
        self.seen(slo, now_s)

    def tightest(self, now_s: float) -> tuple[float, float] | None:
        """Return the shortest TTFT and TPOT promised to classes that are present.

        A value is infinite if none is promised. None if no class is present.
        """
        self._forget(now_s)
        slos = [entry.slo for entry in self._classes.values()]
        if not slos:
            return None
        ttft_s = min((slo.ttft_s for slo in slos if slo.ttft_s), default=inf)
        tpot_s = min((slo.tpot_s for slo in slos if slo.tpot_s), default=inf)
        return ttft_s, tpot_s

    def share(self, slo: Slo, now_s: float) -> float:
        """Return the share of a promise's slack that this class may use."""
        self._forget(now_s)
        own = self._of(slo, now_s)
        is_first = not any(entry.goes_before(own) for entry in self._classes.values())
        return 1.0 if is_first else 1.0 - RESERVED_SHARE

    def tightest_tpot_s(self, slo: Slo, idle_s: float) -> float:
        """Return the shortest TPOT promised to this class or any of at least its priority.

        All requests of a batch share the same step. Promises of others up to `idle_s`, the TPOT of
        a request of this class in a batch of its own, do not count.
        """
        others = (entry.slo for entry in self._classes.values())
        tpots_s = [
            other.tpot_s
            for other in others
            if other.priority >= slo.priority and other.tpot_s > idle_s
        ]
        return min([slo.tpot_s, *tpots_s])

    def _of(self, slo: Slo, now_s: float) -> _Class:
        return self._classes.setdefault((slo.name, slo.tenant), _Class(slo, now_s))

    def _forget(self, now_s: float) -> None:
        self._classes = {
            name: entry
            for name, entry in self._classes.items()
            if entry.num_inflight or now_s - entry.last_seen_s <= PRESENCE_S
        }
