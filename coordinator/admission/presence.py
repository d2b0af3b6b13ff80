"""Which classes with promises are around, so that others leave room to them.

Of the room there is, the last part is kept for the class that goes first: the one of the highest
priority, and among equal ones that with the fewest requests on the nodes for its weight. So a flood
of one class is refused a little earlier than what others send now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pdserve.protocol import Slo

RESERVED_SHARE = 0.1  # of the room: for who goes first
PRESENCE_S = 2.0  # a class is around for so long after it was last seen


@dataclass(slots=True)
class _Class:
    slo: Slo
    last_seen_s: float
    num_inflight: int = 0

    def goes_before(self, other: _Class) -> bool:
        """Whether the last room is for this one."""
        if self.slo.priority != other.slo.priority:
            return self.slo.priority > other.slo.priority
        return self.num_inflight / self.slo.weight < other.num_inflight / other.slo.weight


class Presence:
    """By class: requests on the nodes, and the last one seen."""

    def __init__(self) -> None:
        self._classes: dict[str, _Class] = {}

    def seen(self, slo: Slo, now_s: float) -> None:
        """A request of this class has arrived, whatever becomes of it."""
        entry = self._of(slo, now_s)
        entry.last_seen_s = now_s
        if slo.ttft_s > entry.slo.ttft_s:  # less of its time had passed: nearer to the promise
            entry.slo = slo

    def dispatched(self, slo: Slo, now_s: float) -> None:
        """One more is on the nodes."""
        self._of(slo, now_s).num_inflight += 1

    def ended(self, slo: Slo, now_s: float) -> None:
        """One of these is over."""
        self._of(slo, now_s).num_inflight -= 1
        self.seen(slo, now_s)

    def tightest(self, now_s: float) -> tuple[float, float] | None:
        """The shortest TTFT and TPOT promised to anybody around, infinite without any; None when
        nobody is."""
        self._forget(now_s)
        slos = [entry.slo for entry in self._classes.values()]
        if not slos:
            return None
        ttft_s = min((slo.ttft_s for slo in slos if slo.ttft_s), default=inf)
        tpot_s = min((slo.tpot_s for slo in slos if slo.tpot_s), default=inf)
        return ttft_s, tpot_s

    def share(self, slo: Slo, now_s: float) -> float:
        """Of the room of a promise: what this class may use."""
        self._forget(now_s)
        own = self._of(slo, now_s)
        is_first = not any(entry.goes_before(own) for entry in self._classes.values())
        return 1.0 if is_first else 1.0 - RESERVED_SHARE

    def tightest_tpot_s(self, slo: Slo, idle_s: float) -> float:
        """The shortest TPOT promised to this class or one around that it does not go before.

        All requests of a batch have the same step. A promise does not count that is less than
        `idle_s`, which a request of this class takes in a batch of its own.
        """
        others = (entry.slo for entry in self._classes.values())
        tpots_s = [
            other.tpot_s
            for other in others
            if other.priority >= slo.priority and other.tpot_s > idle_s
        ]
        return min([slo.tpot_s, *tpots_s])

    def _of(self, slo: Slo, now_s: float) -> _Class:
        return self._classes.setdefault(slo.payer, _Class(slo, now_s))

    def _forget(self, now_s: float) -> None:
        self._classes = {
            name: entry
            for name, entry in self._classes.items()
            if entry.num_inflight or now_s - entry.last_seen_s <= PRESENCE_S
        }
