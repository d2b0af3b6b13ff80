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
SPARE = 0.5  # of a TTFT: who needs more of it for a pair has little in hand, should others come
BRIEF = 0.1  # of its prefill: an answer that takes less is no burden to a node of prompts
HARMLESS = 0.05  # of others' promises
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
    it keeps more, and harms others by no more than its own promise is worth. Where it harms hardly
    anybody it stays on one node if passing it on gains little (`_stays`). What nothing is promised
    to goes where it does better, with all that it does to others (`harm`).

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
        is_harmless = harm <= HARMLESS and _keeps(slo, local, SAFETY)
        return local if is_harmless and _stays(slo, pair, local, num_steps) else pair
    if harm > 1:  # more than its own promise is worth
        return pair
    return local if _keeps(slo, local) or not _keeps(slo, pair) else pair


def _stays(slo: Slo, pair: Placement, local: Placement, num_steps: float) -> bool:
    """Whether passing it on gains less than it costs, where nobody is harmed by a local prompt."""
    is_cached = 2 * local.idle_ttft_s < pair.idle_ttft_s
    is_risky = SPARE * slo.ttft_s < pair.ttft_s > local.ttft_s
    is_brief = local.tpot_s * local.output_tokens < BRIEF * local.idle_ttft_s
    prefills_anyway = local.decode is pair.prefill
    return num_steps <= 1 or is_cached or is_risky or (is_brief and prefills_anyway)


def _keeps(slo: Slo, placement: Placement, share: float = 1.0) -> bool:
    keeps_ttft = not slo.ttft_s or placement.ttft_s <= share * slo.ttft_s
    return keeps_ttft and (not slo.tpot_s or placement.tpot_s <= share * slo.tpot_s)


def _excess(ratio: F) -> F:
    return (ratio - 1) * (ratio > 1)
