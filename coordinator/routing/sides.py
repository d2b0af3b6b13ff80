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
SPARE = 0.5  # of a promised TTFT, above which a pair is a gamble: others may go before its prompt
HARMLESS = 0.02  # of others' promises
MISS = 10.0  # so much worse is what is beyond a promise than what is within it


def score(slo: Slo, ttft_s: F, tpot_s: F) -> F:
    """TTFT and TPOT in units of what was promised, the excess counting more; less is better."""
    total = ttft_s / (slo.ttft_s or USUAL_TTFT_S) + tpot_s / (slo.tpot_s or USUAL_TPOT_S)
    if slo.ttft_s:
        total = total + MISS * _excess(ttft_s / (SAFETY * slo.ttft_s))
    if slo.tpot_s:
        total = total + MISS * _excess(tpot_s / (SAFETY * slo.tpot_s))
    return total


def choose(slo: Slo, pair: Placement, local: Placement, harm: float, num_steps: float) -> Placement:
    """What is promised is passed on while that keeps the promise; else one node does all of it, if
    it keeps more. A prompt that would wait for most of its TTFT goes to a node that is sooner and
    has hardly anybody to harm. What nothing is promised to goes where it does better, with all that
    it does to others (`harm`).

    Streams pay for a prompt that is computed beside them, those to come as well as those that are
    there; a pool of its own spares them that, and being sooner than promised helps nobody.

    If both would break the promise there is more to do than can be done. A local request then waits
    before token 1, where its node can put off what is late already; a pair, when half of its work
    is done.

    `num_steps` is how many steps of the local node the prompt would take part in. With a single one
    passing it on is more work than computing it, for both nodes.
    """
    if not (slo.ttft_s or slo.tpot_s):
        pair_score = score(slo, pair.ttft_s, pair.tpot_s)
        is_better = score(slo, local.ttft_s, local.tpot_s) + harm < pair_score
        return local if num_steps <= 1 or is_better else pair
    if _keeps(slo, pair, SAFETY):
        is_sooner = SPARE * slo.ttft_s < pair.ttft_s > local.ttft_s
        spares_all = harm <= HARMLESS and _keeps(slo, local, SAFETY)
        return local if is_sooner and spares_all else pair
    return pair if _keeps(slo, pair) and not _keeps(slo, local) else local


def _keeps(slo: Slo, placement: Placement, share: float = 1.0) -> bool:
    keeps_ttft = not slo.ttft_s or placement.ttft_s <= share * slo.ttft_s
    return keeps_ttft and (not slo.tpot_s or placement.tpot_s <= share * slo.tpot_s)


def _excess(ratio: F) -> F:
    return (ratio - 1) * (ratio > 1)
