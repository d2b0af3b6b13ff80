"""Adaptive mode: whether a request is passed on, or one node does all of it."""

from __future__ import annotations

from typing import TypeVar

from coordinator.routing.placement import Placement
from coordinator.routing.slots import Floats
from pdserve.protocol import Slo

F = TypeVar("F", float, Floats)

# By which times are measured where nothing was promised.
USUAL_TTFT_S = 10.0
USUAL_TPOT_S = 0.25
SAFETY = 0.9  # of a promise is aimed at, as nodes do
MISS = 10.0  # so much worse is what is beyond a promise than what is within it
# What a local prompt takes from others counts so much more than what it gains: while a promise is
# kept, being sooner is a kindness, but time that streams lose is lost to all that come later.
HARM = 4.0


def score(slo: Slo, ttft_s: F, tpot_s: F) -> F:
    """TTFT and TPOT in units of what was promised, the excess counting more; less is better."""
    total = ttft_s / (slo.ttft_s or USUAL_TTFT_S) + tpot_s / (slo.tpot_s or USUAL_TPOT_S)
    if slo.ttft_s:
        total = total + MISS * _excess(ttft_s / (SAFETY * slo.ttft_s))
    if slo.tpot_s:
        total = total + MISS * _excess(tpot_s / (SAFETY * slo.tpot_s))
    return total


def choose(slo: Slo, pair: Placement, local: Placement, harm: float, num_steps: float) -> Placement:
    """The one that does better by the promise; what a local prompt does to others counts, too.

    `num_steps` is how many steps of the local node the prompt would take part in. With a single one
    passing it on is more work than computing it, for both nodes.

    If both would break the promise there is more to do than can be done. A local request then waits
    before token 1, where its node can put off what is late already; a pair, when half of its work
    is done.
    """
    if not (_keeps(slo, pair) or _keeps(slo, local)):
        return local
    if num_steps <= 1 and _keeps(slo, local, SAFETY):
        return local
    pair_score = score(slo, pair.ttft_s, pair.tpot_s)
    local_score = score(slo, local.ttft_s, local.tpot_s) + HARM * harm
    return local if local_score < pair_score else pair


def _keeps(slo: Slo, placement: Placement, share: float = 1.0) -> bool:
    keeps_ttft = not slo.ttft_s or placement.ttft_s <= share * slo.ttft_s
    return keeps_ttft and (not slo.tpot_s or placement.tpot_s <= share * slo.tpot_s)


def _excess(ratio: F) -> F:
    return (ratio - 1) * (ratio > 1)
