"""Whose streams would give their places on a decode node to a new request.

Nodes preempt streams of lower priorities, and those of a flood of equal priority that has more
places than its share (`decode_node/policies/places.py`). So a request does not wait until such
streams end, however many there are. A payer counts as a flood if the places would not hold its
requests.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from coordinator.routing.loads.prefill import ServiceClass
from coordinator.routing.loads.slots import Floats, Ints, SlotArrays


class DecodeShares(SlotArrays):
    """Our own decode legs, by slot and service class."""

    def __init__(self) -> None:
        super().__init__()
        self._legs: Ints = np.zeros((self.capacity, 0), np.int64)
        self._columns: dict[ServiceClass, int] = {}  # of the classes that have legs
        self._free_columns: list[int] = []
        self._num_of_class: Counter[ServiceClass] = Counter()

    def add(self, slot: int, service_class: ServiceClass, sign: int) -> None:
        """Count a leg (sign 1), or no longer (-1)."""
        self.reserve(slot)
        column = self._column(service_class)
        self._legs[slot, column] += sign
        self._num_of_class[service_class] += sign
        if self._num_of_class[service_class] == 0:
            del self._num_of_class[service_class], self._columns[service_class]
            self._free_columns.append(column)

    def yielding(self, newcomer: ServiceClass, batch: Ints, max_batch: Ints) -> Ints:
        """Return how many requests of a batch would give their places to a new one, by slot.

        `batch`: the requests that are expected in it now, by slot, of which some may have given
        their places to earlier ones; `max_batch`: its places.
        """
        own = self._columns.get(newcomer)
        own_legs = 0 if own is None else self._legs[:, own]
        num_yielding: Ints = np.zeros(self.capacity, np.int64)
        for other, column in self._columns.items():
            if other.priority < newcomer.priority:
                num_yielding += self._legs[:, column]
            elif other.priority == newcomer.priority and column != own:
                legs = self._legs[:, column]
                is_flood = legs + own_legs > max_batch
                theirs = np.minimum(legs, batch - own_legs) * is_flood
                share: Floats = np.ceil((own_legs + 1) * (other.weight / newcomer.weight))
                kept = np.minimum(max_batch - own_legs, share.astype(np.int64))
                num_yielding += np.maximum(theirs - np.maximum(kept, 0), 0)
        return num_yielding

    def clear(self, slot: int) -> None:
        """Forget the legs of a lost node."""
        for service_class, column in list(self._columns.items()):
            if num_legs := int(self._legs[slot, column]):
                self.add(slot, service_class, -num_legs)

    def _column(self, service_class: ServiceClass) -> int:
        column = self._columns.get(service_class)
        if column is None:
            if not self._free_columns:
                self._free_columns.append(self._legs.shape[1])
                self._legs = np.pad(self._legs, ((0, 0), (0, 1)))
            column = self._columns[service_class] = self._free_columns.pop()
        return column
