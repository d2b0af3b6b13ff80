"""Predicts the decode phase of a request that another node has prefilled.

Its TPOT is set by the batch that the decode node will have when token 1 is there, not by the
current one. All waiting after token 1 falls between tokens 1 and 2: for the KV transfer, for
prompts that reached the decode node earlier, and for a place in the batch.
"""

from __future__ import annotations

import numpy as np

from coordinator.routing.loads.slots import Floats
from coordinator.routing.outlook import NO_PLACE_S, Outlook, Times


class HandedOff:
    """Predictions for all decode nodes, given the prefill node; arrays are by slot."""

    def __init__(self, outlook: Outlook, prefill: int, ttft_s: float, begins_s: Floats) -> None:
        """`begins_s`: the time until a prompt sent to a node now would begin its prefill there."""
        self._outlook = outlook
        self._ttft_s = ttft_s
        self._begins_s = begins_s
        self._handoff_s = outlook.handoffs_s(prefill, ttft_s)
        self._line_s = np.maximum(begins_s - ttft_s, 0.0)
        self.tpot_s: Floats = outlook.paces_s(ttft_s, NO_PLACE_S)
        self.tpot_s += (self._handoff_s + self._line_s) / outlook.num_gaps

    def times(self, decode: int) -> Times:
        """Return the times at one decode node, including the wait for a place."""
        tpot_s = float(self.tpot_s[decode])
        if tpot_s >= NO_PLACE_S:
            ready_s = max(self._ttft_s, float(self._begins_s[decode]))
            wait_s, pace_s = self._outlook.view.place(decode, ready_s)
            held_s = min(wait_s, self._may_hold_s())
            between_s = float(self._handoff_s[decode] + self._line_s[decode]) + wait_s - held_s
            tpot_s = pace_s + between_s / self._outlook.num_gaps
            return Times(self._ttft_s + held_s, tpot_s, wait_s, held_s)
        return Times(self._ttft_s, tpot_s)

    def _may_hold_s(self) -> float:
        """Return how long token 1 may be held back at a node without a place."""
        request = self._outlook.request
        if request.slo.tpot_s <= 0:
            return 0.0
        return max(0.0, request.slo.hold_s - request.waited_s - self._ttft_s)

    def idle_tpot_s(self, decode: int) -> float:
        """Return the TPOT at a decode node with nothing else to do, including the handoff."""
        between_s = float(self._handoff_s[decode])
        return self._outlook.alone_s(decode) + between_s / self._outlook.num_gaps
