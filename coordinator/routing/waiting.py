"""How long until nodes will have a place for a request, or a pace that it was promised.

Nodes let a request into their batch while the step that it makes stays within 0.9 of the promised
TPOT, while there are rows, and while there is room for its KV; others wait for somebody to end. The
answers come from the calendar of what is in flight: nothing that may still arrive is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coordinator.routing.decode_load import DecodeLoad
from coordinator.routing.fleet import Fleet
from coordinator.routing.placement import Placement
from coordinator.routing.sides import SAFETY
from coordinator.routing.slots import Ints
from pdserve._native import FleetView


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What a request takes of a batch, and asks of it."""

    context: int  # tokens that it reads at each step, on average over its life
    num_tokens: int  # of KV at its end
    tpot_s: float  # promised; 0: nothing

    def view(self, fleet: Fleet, decodes: DecodeLoad, now_s: float) -> FleetView:
        """The nodes as they are to it, until the books or members say something else."""
        limit_s = SAFETY * self.tpot_s or inf  # of a step with it
        calendar = decodes.forecast.advanced(now_s)
        size = self.context, self.num_tokens
        return FleetView(fleet.tables, fleet, decodes, calendar, now_s, *size, limit_s)


def tpot_within_s(
    fleet: Fleet,
    decodes: DecodeLoad,
    slots: Ints,
    placement: Placement,
    tpot_s: float,
    now_s: float,
) -> float | None:
    """Seconds until one of these nodes keeps this TPOT for such a request; None: not foreseen."""
    context = placement.prompt_tokens + placement.output_tokens // 2
    newcomer = Newcomer(context, context, 0.0)
    return newcomer.view(fleet, decodes, now_s).within(slots, tpot_s)
