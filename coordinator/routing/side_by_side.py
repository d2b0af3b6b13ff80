"""Predicts a request on nodes that compute prompts and decodes side by side: multiplexed mode.

As between two nodes, prompts wait for prompts, and streams for streams; nothing is handed off. How
fast either is with its share of the cores, nodes learn by the correction of their step times. A
prompt is begun when its stream has a place, so a wait for one comes before token 1.
"""

from __future__ import annotations

from coordinator.routing.loads.slots import Floats, Ints
from coordinator.routing.outlook import NO_PLACE_S, Outlook, Times
from coordinator.routing.sides import score


class SideBySide:
    """Predictions for these nodes; arrays are by slot."""

    def __init__(self, outlook: Outlook, slots: Ints) -> None:
        self._outlook = outlook
        pace_s = outlook.paces_s(float(outlook.ttft_s[slots].min()), NO_PLACE_S)
        self.cost: Floats = score(outlook.request.slo, outlook.ttft_s, pace_s)

    def times(self, slot: int) -> Times:
        """Return the times at one node."""
        outlook, ttft_s = self._outlook, float(self._outlook.ttft_s[slot])
        if outlook.ends_with_token_1:
            return Times(ttft_s, 0.0)
        tpot_s = float(outlook.paces_s(ttft_s, NO_PLACE_S)[slot])
        if tpot_s >= NO_PLACE_S:
            wait_s, tpot_s = outlook.view.place(slot, float(outlook.queue_s[slot]))
            ttft_s += wait_s
        return Times(ttft_s, tpot_s)
