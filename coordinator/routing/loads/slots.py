"""Arrays indexed by registry slot, so that a decision over a thousand members is vectorised."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


class SlotArrays:
    """Base class for state by slot: every array attribute has the slots as its first axis."""

    def __init__(self, capacity: int = 16) -> None:
        self.capacity = capacity

    def reserve(self, slot: int) -> None:
        """Grow the arrays to include this slot; new elements are zero."""
        if slot < self.capacity:
            return
        num_new = max(self.capacity, slot + 1 - self.capacity)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                added = np.zeros((num_new, *array.shape[1:]), array.dtype)
                setattr(self, name, np.concatenate([array, added]))
        self.capacity += num_new
