"""Predicts how long until a node has a place for a request, or can keep a promised TPOT.

A node admits a request to its batch by the batch rule (`pdserve/rules/batch.py`); other requests
wait until one ends. The predictions are based on the calendar of requests in flight; future
arrivals are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.decode import DecodeLoad
from coordinator.routing.loads.slots import Ints
from coordinator.routing.placement import Placement
from pdserve._native import FleetView
from pdserve.rules.batch import aimed_s


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What a new request needs from a decode batch."""

    context: int  # tokens read at each step, averaged over its life
    num_tokens: int  # of KV at its end
    tpot_s: float  # promised; 0: no promise

    def view(
        self, fleet: Fleet, decodes: DecodeLoad, now_s: float, yielding: Ints | None = None
    ) -> FleetView:
        """Return a view of the nodes for this request; valid until books or members change.

        `yielding`: how many requests of each batch would give way to it; None: none.
        """
        if yielding is None:
            yielding = np.zeros(fleet.capacity, np.int64)
        calendar = decodes.forecast.advanced(now_s)
        needs = self.context, self.num_tokens, aimed_s(self.tpot_s)
        return FleetView(fleet.tables, fleet, decodes, calendar, now_s, *needs, yielding)


def tpot_within_s(
    fleet: Fleet,
    decodes: DecodeLoad,
    slots: Ints,
    placement: Placement,
    tpot_s: float,
    now_s: float,
) -> float | None:
    """Return the seconds until one of these nodes keeps this TPOT for such a request.

    None if that is beyond the forecast.
    """
    context = placement.prompt_tokens + placement.output_tokens // 2
    newcomer = Newcomer(context, context, 0.0)
    return newcomer.view(fleet, decodes, now_s).within(slots, tpot_s)
