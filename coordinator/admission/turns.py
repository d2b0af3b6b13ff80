"""Which payer of one priority is served next: a heap ordered by fair share."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

from pdserve.fair_share import FairShare, Payer

FEW: Final = 64  # outdated turns that may stay in the heap


class _Turn(NamedTuple):
    """A heap entry of one payer; outdated once the payer has a newer entry or has left."""

    rank: float
    number: int  # ties are broken in order of creation
    payer: Payer


class Turns:
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
