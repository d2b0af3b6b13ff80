"""Tables of the step costs that nodes have reported, in the layout that csrc/routing/node.h reads.

Nodes that report the same costs share a row. The part of a step's time that is piecewise linear in
its tokens is tabulated, with one column per number of tokens; each other cost has its own array.
"""

from __future__ import annotations

from heapq import heappop, heappush

import msgspec
import numpy as np

from coordinator.routing.loads.slots import Floats, Ints, SlotArrays
from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import PerfReport


class StepTables(SlotArrays):
    """Step costs by row, without the nodes' own ratios of real to profiled time."""

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self.seconds: Floats = np.zeros((1, 1))  # [row, tokens] of a step
        self.num_tabulated: Ints = np.zeros(1, np.int64)  # largest valid column of `seconds`
        self.token_budget: Ints = np.ones(1, np.int64)
        self.max_batch: Ints = np.ones(1, np.int64)
        self.full_step_s: Floats = np.ones(1)  # step of the full token budget
        self.sampled_s: Floats = np.zeros(1)
        self.pair_s: Floats = np.zeros(1)
        self.context_s: Floats = np.zeros(1)
        self.rising: Floats = np.zeros((1, 1))  # running maximum of `seconds` along tokens
        self._rows: dict[bytes, int] = {}  # by encoded costs
        self._keys: list[bytes] = []  # by row
        self._num_users: list[int] = []
        self._free: list[int] = []  # a heap of rows

    def take(self, perf: PerfReport) -> int:
        """Return the row of these costs, and count one more user of it."""
        key = msgspec.msgpack.encode((perf.step, perf.token_budget, perf.max_batch_size))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._free_row()
            self._keys[row] = key
            self._fill(row, perf)
        self._num_users[row] += 1
        return row

    def drop(self, row: int) -> None:
        """Count one user less; a row without users is free."""
        self._num_users[row] -= 1
        if self._num_users[row] == 0:
            del self._rows[self._keys[row]]
            heappush(self._free, row)

    def _free_row(self) -> int:
        if self._free:
            return heappop(self._free)
        self._keys.append(b"")
        self._num_users.append(0)
        self.reserve(len(self._keys) - 1)
        return len(self._keys) - 1

    def _fill(self, row: int, perf: PerfReport) -> None:
        width = max(perf.token_budget, perf.max_batch_size) + 1
        num_new = width - self.seconds.shape[1]
        if num_new > 0:
            self.seconds = np.pad(self.seconds, ((0, 0), (0, num_new)))
        model = PerfModel(perf.step)
        self.seconds[row] = 0.0  # a step of no tokens takes no time
        self.seconds[row, 1:width] = [model.step_s(StepShape(n)) for n in range(1, width)]
        self.full_step_s[row] = self.seconds[row, perf.token_budget]
        self.num_tabulated[row] = width - 1
        self.token_budget[row] = perf.token_budget
        self.max_batch[row] = perf.max_batch_size
        self.sampled_s[row] = perf.step.sampled_s
        self.pair_s[row] = perf.step.pair_s
        self.context_s[row] = perf.step.context_s
        # Measured times may dip a little; what matters is where a step first takes longer.
        self.rising = np.maximum.accumulate(self.seconds, axis=1)

    def reserve(self, slot: int) -> None:
        """Grow the arrays, whose first axis is rows here; new divisors are 1."""
        former = self.capacity
        super().reserve(slot)
        for ones in (self.token_budget, self.max_batch, self.full_step_s):
            ones[former:] = 1
