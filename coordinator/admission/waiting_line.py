"""A bounded line of requests that wait in the coordinator; first come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Place(Generic[T]):
    waiter: T
    since_s: float


class WaitingLine(Generic[T]):
    """Waiters by id, in the order of their coming; any may leave at any time."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._places: dict[str, _Place[T]] = {}  # dicts keep the order

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, waiter_id: str) -> bool:
        return waiter_id in self._places

    @property
    def is_full(self) -> bool:
        """Whether nobody may join."""
        return len(self._places) >= self._max_waiting

    @property
    def head(self) -> T | None:
        """Who is next."""
        return next((place.waiter for place in self._places.values()), None)

    def join(self, waiter_id: str, waiter: T, now_s: float) -> None:
        """At the end. Raises ValueError when the line is full or the id is in it."""
        if self.is_full or waiter_id in self._places:
            raise ValueError(f"{waiter_id} cannot join a line of {len(self)}")
        self._places[waiter_id] = _Place(waiter, now_s)

    def leave(self, waiter_id: str) -> None:
        """Served or gone; harmless when it is not in the line."""
        self._places.pop(waiter_id, None)

    def advance_s(self, now_s: float) -> float:
        """Seconds until somebody leaves, at the pace at which the head has come to be the head.

        Little's law: a line through which it takes W seconds has its n places left one each W / n.
        """
        head = next(iter(self._places.values()), None)
        return 0.0 if head is None else (now_s - head.since_s) / len(self)
