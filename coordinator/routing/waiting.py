"""How long until nodes will have a place for a request, or a pace that it was promised.

Nodes let a request into their batch while the step that it makes stays within 0.9 of the promised
TPOT, while there are rows, and while there is room for its KV; others wait for somebody to end. The
answers come from the calendar of what is in flight: nothing that may still arrive is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from coordinator.routing.decode_load import Batch, DecodeLoad
from coordinator.routing.fleet import Fleet
from coordinator.routing.forecast import BUCKET_S, NUM_BUCKETS
from coordinator.routing.placement import Placement
from coordinator.routing.sides import SAFETY
from coordinator.routing.slots import Bools, Floats, Ints, Slots

STRIDE = 8  # buckets between two looks at many nodes
HORIZON_S = NUM_BUCKETS * BUCKET_S


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What a request takes of a batch, and asks of it."""

    context: int  # tokens that it reads at each step, on average over its life
    num_tokens: int  # of KV at its end
    tpot_s: float  # promised; 0: nothing

    @property
    def limit_s(self) -> float:
        """Of a step with it."""
        return SAFETY * self.tpot_s or inf


class Place(NamedTuple):
    """What a request finds at one node."""

    wait_s: float  # from when it could have joined
    pace_s: float  # of a token, once it has


def pace_s(fleet: Fleet, slots: Slots, batch: Batch, newcomer: Newcomer) -> Floats:
    """Seconds a token in these batches with the newcomer in them."""
    return fleet.decode_s(slots, batch.requests + 1, batch.context + newcomer.context)


def has_place(
    fleet: Fleet, slots: Slots, batch: Batch, newcomer: Newcomer, with_it_s: Floats
) -> Bools:
    """Whether it may join these batches, whose pace with it is `with_it_s`; a request alone may."""
    most = fleet.tables.max_batch[fleet.row[slots]]
    fits: Bools = (batch.requests < most) & (with_it_s <= newcomer.limit_s)
    fits &= batch.context + newcomer.num_tokens <= fleet.kv_tokens[slots]
    fits |= batch.requests == 0
    return fits


def place_at(
    fleet: Fleet, decodes: DecodeLoad, slot: int, newcomer: Newcomer, now_s: float, ready_s: float
) -> Place:
    """The first place at a node from `ready_s` on; the horizon's end at most."""
    batch = decodes.ahead(now_s, np.array([slot]), 1)
    batch = Batch(batch.requests[:, 0], batch.context[:, 0])
    slots = np.full(NUM_BUCKETS, slot)
    with_it_s = pace_s(fleet, slots, batch, newcomer)
    first = min(int((ready_s - now_s) / BUCKET_S), NUM_BUCKETS - 1)
    fits = has_place(fleet, slots, batch, newcomer, with_it_s)[first:]
    # Who is to join later has been sent there earlier, and goes before it.
    fits = np.logical_and.accumulate(fits[::-1])[::-1]
    num_waited = int(fits.argmax()) if fits.any() else len(fits) - 1
    return Place(num_waited * BUCKET_S, float(with_it_s[first + num_waited]))


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
    ahead = decodes.ahead(now_s, slots, STRIDE)
    for moment, batch in enumerate(map(Batch, ahead.requests, ahead.context)):
        with_it_s = pace_s(fleet, slots, batch, newcomer)
        fits = has_place(fleet, slots, batch, newcomer, with_it_s)
        if (fits & (with_it_s <= tpot_s)).any():
            return moment * STRIDE * BUCKET_S
    return None
