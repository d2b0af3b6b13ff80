"""A bounded line of requests that wait in the coordinator, in which payers share what there is.

Higher priorities go first; in one, the payer whose requests were given least for its weight, in
tokens (`pdserve/fair_share.py`); of one payer's, the one that came first. Nobody goes past the
head. To find it takes a logarithm of the number of payers, however many requests wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from coordinator.admission.turns import Turns
from pdserve.fair_share import Payer

T = TypeVar("T")

MOST_TIMES_FREE: Final = 9  # a payer may have so many times the places that are free
FEW: Final = 64  # priorities that are not worth forgetting


@dataclass(frozen=True, slots=True)
class _Place(Generic[T]):
    waiter: T
    payer: Payer
    since_s: float


class WaitingLine(Generic[T]):
    """Waiters by id; any may leave at any time."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._places: dict[str, _Place[T]] = {}  # by id, oldest first: dicts keep the order
        self._queues: dict[tuple[int, str], dict[str, _Place[T]]] = {}  # of payers; none is empty
        self._turns: dict[int, Turns] = {}  # by priority, the last one charged or joined last
        self._most_turns = FEW  # forget old ones when there are more: clients choose priorities

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """All who wait, oldest first."""
        return (place.waiter for place in self._places.values())

    def __contains__(self, waiter_id: str) -> bool:
        return waiter_id in self._places

    @property
    def num_payers(self) -> int:
        """Who have requests in it; one of two priorities counts twice."""
        return len(self._queues)

    @property
    def head(self) -> T | None:
        """Who is next."""
        if not self._places:
            return None
        priority = max(priority for priority, turns in self._turns.items() if len(turns))
        payer = self._turns[priority].first
        assert payer is not None
        return next(iter(self._queues[_key(payer)].values())).waiter

    def num_waiting(self, payer: Payer) -> int:
        """Requests of this payer's."""
        return len(self._queues.get(_key(payer), ()))

    def is_full(self, payer: Payer) -> bool:
        """Whether no more of this payer's may join.

        Nobody can fill the line alone: the more a payer has in it, the more must be left free for
        others (dynamic thresholds, by which switches share their buffers).
        """
        num_free = self._max_waiting - len(self)
        return self.num_waiting(payer) >= MOST_TIMES_FREE * num_free

    def join(self, waiter_id: str, waiter: T, payer: Payer, now_s: float) -> None:
        """As its payer's last. Raises ValueError when the line is full or the id is in it."""
        if self.is_full(payer) or waiter_id in self._places:
            raise ValueError(f"{waiter_id} cannot join a line of {len(self)}")
        place = self._places[waiter_id] = _Place(waiter, payer, now_s)
        if _key(payer) not in self._queues:
            self._queues[_key(payer)] = {}
            self._turns_of(payer).join(payer)
        self._queues[_key(payer)][waiter_id] = place

    def leave(self, waiter_id: str) -> None:
        """Served or gone; harmless when it is not in the line."""
        place = self._places.pop(waiter_id, None)
        if place is None:
            return
        key = _key(place.payer)
        del self._queues[key][waiter_id]
        if not self._queues[key]:
            del self._queues[key]
            self._turns[place.payer.priority].leave(place.payer)

    def charge(self, payer: Payer, num_tokens: float) -> None:
        """A request of this payer's is given so much, whether it has waited or not; less than 0:
        what was charged for one was too much."""
        self._turns_of(payer).charge(payer, num_tokens)
        if len(self._turns) > self._most_turns:
            self._forget_turns()

    def advance_s(self, payer: Payer, now_s: float) -> float:
        """Seconds until one of this payer's leaves, at the pace at which its first one has come to
        be the first; of all, if none of its waits.

        Little's law: a line through which it takes W seconds has its n places left one each W / n.
        """
        places = self._queues.get(_key(payer), self._places)
        first = next(iter(places.values()), None)
        return 0.0 if first is None else (now_s - first.since_s) / len(places)

    def _turns_of(self, payer: Payer) -> Turns:
        turns = self._turns.pop(payer.priority, None)
        if turns is None:  # one that nobody waits in is false
            turns = Turns()
        self._turns[payer.priority] = turns
        return turns

    def _forget_turns(self) -> None:
        """Who was given what in priorities that nobody waits in; but for the last few."""
        kept = [*self._turns][-FEW:]
        self._turns = {p: turns for p, turns in self._turns.items() if len(turns) or p in kept}
        self._most_turns = len(self._turns) + FEW


def _key(payer: Payer) -> tuple[int, str]:
    return payer.priority, payer.payer
