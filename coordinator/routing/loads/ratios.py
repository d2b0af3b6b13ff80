"""How much longer steps take than profiled, by slot: as nodes report it, or as of equal nodes."""

from __future__ import annotations

import numpy as np

from coordinator.routing.loads.slots import Bools, Floats, Ints, SlotArrays


class Ratios(SlotArrays):
    """Ratios of real to profiled time of one kind of steps.

    A node that has not measured its own has the median of nodes with the same profile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: Floats = np.ones(self.capacity)
        self._is_known: Bools = np.zeros(self.capacity, np.bool_)
        self._typical: dict[int, float] = {}  # row |-> median of its known ratios

    def reserve(self, slot: int) -> None:
        """Grow the arrays; new ratios are 1."""
        former = self.capacity
        super().reserve(slot)
        self.values[former:] = 1

    def report(self, slot: int, ratio: float, rows: Ints) -> None:
        """Record what a node has measured; 0: nothing yet, or too long ago.

        `rows` are those of the nodes' profiles, by slot.
        """
        if bool(self._is_known[slot]) != (ratio > 0) or (ratio and self.values[slot] != ratio):
            self.forget_typical()
        self._is_known[slot] = ratio > 0
        self.values[slot] = ratio or self._typical_of(int(rows[slot]), rows)

    def forget(self, slot: int) -> None:
        """Forget the ratio of a lost node."""
        self._is_known[slot] = False
        self.forget_typical()

    def forget_typical(self) -> None:
        """Find medians anew: a ratio has changed, or a node's profile."""
        self._typical.clear()

    def _typical_of(self, row: int, rows: Ints) -> float:
        typical = self._typical.get(row)
        if typical is None:
            equals = self.values[self._is_known & (rows == row)]
            typical = self._typical[row] = float(np.median(equals)) if len(equals) else 1.0
        return typical
