"""The answer of `pdserve plan`."""

from __future__ import annotations

import msgspec

from pdserve.commands.bench.compare.goodput import Goodput
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.plan.knee import Knee
from pdserve.commands.simulation.plan.search import Change, Tried
from pdserve.commands.simulation.predict.answer import Card


class Best(msgspec.Struct, frozen=True):
    """A deployment that serves the load at the least cost of its mode."""

    tried: Tried
    goodput: Goodput | None  # None: requests of other rates are outside of the calibration


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `pdserve plan`."""

    card: Card
    load: str
    rate: float
    promise: Promise
    target: float
    knee: Knee
    chosen: Best | None  # None: no deployment of so many nodes serves the load
    why: str  # it was chosen
    cheapest: list[Best]  # of each mode, all that serve the load at its least cost
    front: list[Tried]  # cost against TPOT
    tried: list[Tried]
    unknown: dict[str, str]  # deployment |-> why nothing was predicted for it
    changes: list[Change]
    command: list[str]  # what starts it
    helm: dict[str, object]  # values of the chart
    seconds: float  # that the answer took
