"""What becomes of a request behind token 1 when another node has prefilled it.

Its tokens come at the pace of the batch that the decode node will have when token 1 is there, and
not of the one that it has now. All waiting from then on falls between tokens 1 and 2: for the KV,
for prompts that came to the decode node earlier, and for a place in the batch.
"""

from __future__ import annotations

import numpy as np

from coordinator.routing.outlook import NO_PLACE_S, Outlook, Times
from coordinator.routing.slots import Floats


class HandedOver:
    """By decode node, when one node prefills; arrays are by slot."""

    def __init__(self, outlook: Outlook, prefill: int, ttft_s: float, begins_s: Floats) -> None:
        """`begins_s`: when a prompt that was sent to a node now would be begun there."""
        self._outlook = outlook
        self._ttft_s = ttft_s
        self._begins_s = begins_s
        self._handover_s = outlook.handovers_s(prefill, ttft_s)
        self._line_s = np.maximum(begins_s - ttft_s, 0.0)
        self.tpot_s: Floats = outlook.paces_s(ttft_s, NO_PLACE_S)
        self.tpot_s += (self._handover_s + self._line_s) / outlook.num_gaps

    def times(self, decode: int) -> Times:
        """At one node, with the wait for a place there."""
        tpot_s = float(self.tpot_s[decode])
        if tpot_s >= NO_PLACE_S:
            ready_s = max(self._ttft_s, float(self._begins_s[decode]))
            wait_s, pace_s = self._outlook.view.place(decode, ready_s)
            held_s = min(wait_s, self._may_hold_s())
            between_s = float(self._handover_s[decode] + self._line_s[decode]) + wait_s - held_s
            tpot_s = pace_s + between_s / self._outlook.num_gaps
            return Times(self._ttft_s + held_s, tpot_s, wait_s, held_s)
        return Times(self._ttft_s, tpot_s)

    def _may_hold_s(self) -> float:
        """For how long token 1 is held back at most, where there is no place."""
        request = self._outlook.request
        if request.slo.tpot_s <= 0:
            return 0.0
        return max(0.0, request.slo.hold_s - request.waited_s - self._ttft_s)

    def idle_tpot_s(self, decode: int) -> float:
        """At a node that has nothing else to do."""
        between_s = float(self._handover_s[decode])
        return self._outlook.alone_s(decode) + between_s / self._outlook.num_gaps
