"""A bounded line of requests that wait in the coordinator, shared fairly between payers.

Higher priorities go first; within a priority, the payer that was given the fewest tokens relative
to its weight (`pdserve/shared/fair_share.py`); within a payer, the oldest request. No request
overtakes the head, unless that waits for something else than room. Finding the head is logarithmic
in the number of payers, however many requests wait.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from pdserve.shared.fair_share import FairShare, Payer

FEW: Final = 64  # outdated turns that may stay in the heap


class _Turn(NamedTuple):
    """A heap entry of one payer; outdated once the payer has a newer entry or has left."""

    rank: float
    number: int  # ties are broken in order of creation
    payer: Payer


class LineTurns:
    """The payers that have waiting requests. A payer's rank changes only when it is charged.

    `FairShare` guarantees this for payers that are named as present whenever others are charged.
    Naming the first payer is enough for all: virtual time never passes the lowest rank.
    """

    def __init__(self) -> None:
        self._shares = FairShare(burst=0.0)
        self._heap: list[_Turn] = []
        self._current: dict[str, _Turn] = {}  # by payer
        self._num_given = 0

    def __len__(self) -> int:
        return len(self._current)

    @property
    def first(self) -> Payer | None:
        """The payer whose turn it is; None if none is waiting."""
        while self._heap and self._current.get(self._heap[0].payer.payer) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].payer if self._heap else None

    def in_order(self) -> Iterator[Payer]:
        """Iterate over all payers that wait, by their turns. None may join or leave meanwhile."""
        if (first := self.first) is not None:
            yield first
            yield from (turn.payer for turn in sorted(self._current.values())[1:])

    def join(self, payer: Payer) -> None:
        """Add a payer that has waiting requests from now on."""
        self._look(payer)
        self._give(payer)

    def leave(self, payer: Payer) -> None:
        """Remove a payer that has no more waiting requests."""
        del self._current[payer.payer]

    def charge(self, payer: Payer, amount: float) -> None:
        """Charge a payer for the work it was given, whether it has waiting requests or not."""
        self._look(payer)
        self._shares.charge(payer, amount)
        if payer.payer in self._current:
            self._give(payer)

    def _look(self, other: Payer) -> None:
        first = self.first
        self._shares.present([other] if first is None else [other, first])

    def _give(self, payer: Payer) -> None:
        turn = _Turn(self._shares.rank(payer), self._num_given, payer)
        self._num_given += 1
        self._current[payer.payer] = turn
        heapq.heappush(self._heap, turn)
        if len(self._heap) > 2 * len(self._current) + FEW:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)


T = TypeVar("T")

MOST_TIMES_FREE: Final = 9  # a payer may have this many times as many places as are free


@dataclass(frozen=True, slots=True)
class _Place(Generic[T]):
    waiter: T
    payer: Payer
    since_s: float


class WaitingLine(Generic[T]):
    """Waiters by id; each may leave at any time. Who is in it stays when it is made shorter."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._places: dict[str, _Place[T]] = {}  # by id, oldest first: dicts keep the order
        self._queues: dict[tuple[int, str], dict[str, _Place[T]]] = {}  # by `_key`; never empty
        self._num_waiting: Counter[str] = Counter()  # by payer, over all priorities; never 0
        self._turns: dict[int, LineTurns] = {}  # by priority, in order of last use
        self._most_turns = FEW  # limit: clients can choose priorities

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all waiters, oldest first."""
        return (place.waiter for place in self._places.values())

    def __contains__(self, waiter_id: str) -> bool:
        return waiter_id in self._places

    @property
    def num_payers(self) -> int:
        """Number of payers with waiting requests; a payer counts once per priority."""
        return len(self._queues)

    @property
    def head(self) -> T | None:
        """The waiter that is served next; None if the line is empty."""
        return next(self.heads(), None)

    def heads(self) -> Iterator[T]:
        """Iterate over the oldest waiter of each payer, by their turns.

        Nobody may join or leave meanwhile.
        """
        used = (priority for priority, turns in self._turns.items() if len(turns))
        for priority in sorted(used, reverse=True):
            for payer in self._turns[priority].in_order():
                yield next(iter(self._queues[_key(payer)].values())).waiter

    def not_below(self, priority: int) -> Iterator[T]:
        """Iterate over the waiters of this priority and of higher ones."""
        queues = (queue for (its, _), queue in self._queues.items() if its >= priority)
        return (place.waiter for queue in queues for place in queue.values())

    def num_waiting(self, payer: Payer) -> int:
        """Return a payer's waiting requests over all priorities, which it may choose freely."""
        return self._num_waiting[payer.payer]

    def is_full(self, payer: Payer) -> bool:
        """Return whether no more requests of this payer may join.

        No payer can fill the line alone: the more places it has, the more must be left free for
        others (dynamic thresholds, as in the shared buffers of switches).
        """
        num_free = max(0, self.max_waiting - len(self))
        return self.num_waiting(payer) >= MOST_TIMES_FREE * num_free

    def longest_wait_s(self, now_s: float) -> float:
        """Return for how long the oldest waiter has waited; 0 for none."""
        oldest = next(iter(self._places.values()), None)
        return 0.0 if oldest is None else now_s - oldest.since_s

    def join(self, waiter_id: str, waiter: T, payer: Payer, now_s: float) -> None:
        """Add a waiter behind the others of its payer.

        Raises ValueError if the line is full for this payer or the id is already in it.
        """
        if self.is_full(payer) or waiter_id in self._places:
            raise ValueError(f"{waiter_id} cannot join a line of {len(self)}")
        place = self._places[waiter_id] = _Place(waiter, payer, now_s)
        if _key(payer) not in self._queues:
            self._queues[_key(payer)] = {}
            self._turns_of(payer).join(payer)
        self._queues[_key(payer)][waiter_id] = place
        self._num_waiting[payer.payer] += 1

    def leave(self, waiter_id: str) -> None:
        """Remove a waiter that is served or gone; does nothing if it is not in the line."""
        place = self._places.pop(waiter_id, None)
        if place is None:
            return
        key, name = _key(place.payer), place.payer.payer
        self._num_waiting[name] -= 1
        if not self._num_waiting[name]:
            del self._num_waiting[name]
        del self._queues[key][waiter_id]
        if not self._queues[key]:
            del self._queues[key]
            self._turns[place.payer.priority].leave(place.payer)

    def charge(self, payer: Payer, num_tokens: float) -> None:
        """Charge a payer for tokens given to a request, whether it has waited or not.

        A negative amount corrects an earlier charge that was too high.
        """
        self._turns_of(payer).charge(payer, num_tokens)
        if len(self._turns) > self._most_turns:
            self._forget_turns()

    def advance_s(self, payer: Payer, now_s: float) -> float:
        """Predict the seconds until one of this payer's requests leaves the line.

        The pace is that of its oldest request so far; if the payer has none waiting, the oldest of
        all. By Little's law, a line of n places with a wait of W seconds is left every W / n.
        """
        places = self._queues.get(_key(payer), self._places)
        first = next(iter(places.values()), None)
        return 0.0 if first is None else (now_s - first.since_s) / len(places)

    def _turns_of(self, payer: Payer) -> LineTurns:
        turns = self._turns.pop(payer.priority, None)
        if turns is None:  # not `or`: empty LineTurns are falsy
            turns = LineTurns()
        self._turns[payer.priority] = turns
        return turns

    def _forget_turns(self) -> None:
        """Drop the shares of priorities without waiters, except the last few used."""
        kept = [*self._turns][-FEW:]
        self._turns = {p: turns for p, turns in self._turns.items() if len(turns) or p in kept}
        self._most_turns = len(self._turns) + FEW


def _key(payer: Payer) -> tuple[int, str]:
    return payer.priority, payer.payer
