"""Whether a request is handed off, or one node serves all of it.

In adaptive mode where neither way is clearly better for all (`capacity.py`), and in flowing mode.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from coordinator.routing.loads.slots import Floats
from coordinator.routing.placement import Placement
from pdserve.protocol import Slo
from pdserve.rules.batch import SAFETY

F = TypeVar("F", float, Floats)

# Units for TTFT and TPOT where nothing was promised.
USUAL_TTFT_S = 10.0
USUAL_TPOT_S = 0.25
SPARE = 0.2  # share of a promise: where a handoff leaves less, others that come may break it
HARMLESS = 0.05  # harm in units of others' promises
MISS = 10.0  # weight of time beyond a promise; time within it has weight 1


class OnOneNode(NamedTuple):
    """One node for all of a request."""

    placement: Placement
    harm: float  # to other requests there, in units of their promises
    has_place: bool  # in its batch, from token 1 to the end


def score(slo: Slo, ttft_s: F, tpot_s: F) -> F:
    """Return TTFT plus TPOT in units of their promises, with extra weight on excess; lower is
    better."""
    total = ttft_s / (slo.ttft_s or USUAL_TTFT_S) + tpot_s / (slo.tpot_s or USUAL_TPOT_S)
    if slo.ttft_s:
        total = total + MISS * _excess(ttft_s / (SAFETY * slo.ttft_s))
    if slo.tpot_s:
        total = total + MISS * _excess(tpot_s / (SAFETY * slo.tpot_s))
    return total


def choose(slo: Slo, pair: Placement, one: OnOneNode) -> Placement:
    """Choose between a handoff (`pair`) and one node for all of the request.

    By their scores. Streams, running and future ones, are slowed by a prompt that is computed
    beside them, and queued prompts by a stream: this harm counts on one node, in the same units. A
    pair spares them that, and a token that comes sooner than promised gains nothing. So a request
    with a promise is handed off while that keeps the promise with SPARE left for what comes later,
    unless one node harms hardly anybody, or has most of the prompt already.

    Where the node has no place for it, or others on their way there need that place, the request is
    handed off. One whose prompt is computed goes before one whose prompt is not, so the prompt
    would wait for much longer than is predicted.
    """
    local = one.placement
    if slo.ttft_s or slo.tpot_s:
        is_cheap = one.harm <= HARMLESS or 2 * local.idle_ttft_s < pair.idle_ttft_s
        if not one.has_place or (keeps(slo, pair, 1 - SPARE) and not is_cheap):
            return pair
    local_score = score(slo, local.ttft_s, local.tpot_s) + one.harm
    return local if local_score < score(slo, pair.ttft_s, pair.tpot_s) else pair


def keeps(slo: Slo, placement: Placement, share: float) -> bool:
    """Return whether a placement is predicted to keep this share of the promise."""
    keeps_ttft = not slo.ttft_s or placement.ttft_s <= share * slo.ttft_s
    return keeps_ttft and (not slo.tpot_s or placement.tpot_s <= share * slo.tpot_s)


def _excess(ratio: F) -> F:
    return (ratio - 1) * (ratio > 1)
