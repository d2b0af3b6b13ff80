"""Predicts a request that one node serves alone, and its effect on the other requests there.

The arithmetic and its reasons are in csrc/routing/one_node.h.
"""

from __future__ import annotations

import numpy as np

from coordinator.routing.loads.slots import Floats, Ints
from coordinator.routing.outlook import NO_PLACE_S, Outlook, Times
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S


class OneNode:
    """Predictions for a few nodes; arrays are in the order of `slots`."""

    def __init__(self, outlook: Outlook, slots: list[int]) -> None:
        self.slots: Ints = np.array(slots)
        self._slots = slots
        self._outlook = outlook
        slo = outlook.request.slo
        outcomes = np.empty((8, len(slots)))
        outlook.view.on_one_node(
            self.slots,
            outlook.queue_s,
            outlook.prompt_s,
            outlook.queues.num_prompts,
            slo.ttft_s or USUAL_TTFT_S,
            slo.tpot_s or USUAL_TPOT_S,
            outlook.output_tokens,
            outcomes,
        )
        self.begins_s: Floats = outcomes[0]  # when the prompt's prefill begins
        self.ttft_s: Floats = outcomes[1]
        self.tpot_s: Floats = outcomes[2]
        self._stalled_s: Floats = outcomes[3]  # part of the TPOT spent behind chunks of prompts
        self.harm: Floats = outcomes[4]  # to other requests, in units of their promises
        self.num_steps: Floats = outcomes[5]  # steps that the prompt takes part in
        self._is_full: Floats = outcomes[6]  # 1: no place in the batch when token 1 is there
        self._crowds: Floats = outcomes[7]  # 1: none at some time until its end

    @property
    def ttft_or_full_s(self) -> Floats:
        """`ttft_s`, plus a large penalty where there is no place in the batch."""
        return self.ttft_s + NO_PLACE_S * self._is_full

    def has_place(self, index: int) -> bool:
        """Return whether the batch has a place from token 1 to the end.

        Else the request would wait, or take a place that another one on its way there needs.
        """
        return not self._crowds[index]

    def index(self, slot: int) -> int | None:
        """Return the index of a slot in `slots`; None if it is not among them."""
        return self._slots.index(slot) if slot in self._slots else None

    def times(self, index: int) -> Times:
        """Return the times at one node; a wait for a place comes before the prompt."""
        ttft_s, tpot_s = float(self.ttft_s[index]), float(self.tpot_s[index])
        if self._is_full[index]:
            wait_s, pace_s = self._outlook.view.place(
                self._slots[index], float(self.begins_s[index])
            )
            ttft_s += wait_s
            tpot_s = pace_s + float(self._stalled_s[index])
        return Times(ttft_s, tpot_s)
