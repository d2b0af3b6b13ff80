"""Adaptive mode: whether a request is handed off, or one node serves all of it."""

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
SPARE = 0.5  # share of a TTFT: a pair that needs more has little slack if other requests arrive
BRIEF = 0.1  # share of the prefill time: a shorter decode is no burden to a prefill node
HARMLESS = 0.05  # harm in units of others' promises
OWN_WORTH = 1.0  # the same unit: as much as the request's own promise
MISS = 10.0  # weight of time beyond a promise; time within it has weight 1


class OnOneNode(NamedTuple):
    """One node for all of a request."""

    placement: Placement
    harm: float  # to other requests there, in units of their promises
    num_steps: float  # of that node, which the prompt would take part in
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

    A request with a promise is handed off while that keeps the promise within SAFETY.
    Otherwise one node serves all of it, unless only the pair keeps the promise, or the harm to
    others is more than the request's own promise is worth. If one node also keeps the promise and
    harms hardly anybody, the request stays there where a handoff gains little (`_stays`). It may
    harm others by its own worth where a pair is at risk because its decode node has no place yet:
    when there is one depends on the ends of others' answers.

    Streams, running and future ones, are slowed by a prompt that is computed beside them. A prefill
    pool spares them that, and a token that comes sooner than promised gains nothing.

    Where the node has no place for it, or others on their way there need that place, the request is
    handed off as well. One whose prompt is computed goes before one whose prompt is not, so the
    prompt would wait for much longer than is predicted.

    If nothing was promised, or both ways would break the promise, the request goes where its score
    is better, counting its harm to others.

    With a prompt of one step, a handoff is more work than the computation itself, for both nodes.
    """
    local = one.placement
    if not (slo.ttft_s or slo.tpot_s):
        return local if one.num_steps <= 1 or _scores_better(slo, pair, one) else pair
    if not one.has_place:
        return pair
    if keeps(slo, pair, SAFETY):
        waits_for_others = _is_risky(slo, pair, local) and pair.wait_s > 0
        bearable = OWN_WORTH if waits_for_others else HARMLESS
        is_harmless = one.harm <= bearable and keeps(slo, local, SAFETY)
        return local if is_harmless and _stays(slo, pair, one) else pair
    if one.harm > OWN_WORTH:
        return pair
    if keeps(slo, local) or keeps(slo, pair):
        return local if keeps(slo, local) else pair
    return local if _scores_better(slo, pair, one) else pair


def _scores_better(slo: Slo, pair: Placement, one: OnOneNode) -> bool:
    local_score = score(slo, one.placement.ttft_s, one.placement.tpot_s) + one.harm
    return local_score < score(slo, pair.ttft_s, pair.tpot_s)


def _stays(slo: Slo, pair: Placement, one: OnOneNode) -> bool:
    """Return whether a handoff costs more than it gains, if a local prompt harms nobody."""
    local = one.placement
    is_cached = 2 * local.idle_ttft_s < pair.idle_ttft_s
    is_brief = local.tpot_s * local.output_tokens < BRIEF * local.idle_ttft_s
    prefills_anyway = local.decode is pair.prefill
    saves_work = one.num_steps <= 1 or is_cached or (is_brief and prefills_anyway)
    return saves_work or _is_risky(slo, pair, local)


def _is_risky(slo: Slo, pair: Placement, local: Placement) -> bool:
    """Return whether a handoff needs much of the promised TTFT, and more than one node."""
    return SPARE * slo.ttft_s < pair.ttft_s > local.ttft_s


def keeps(slo: Slo, placement: Placement, share: float = 1.0) -> bool:
    """Return whether a placement is predicted to keep this share of the promise."""
    keeps_ttft = not slo.ttft_s or placement.ttft_s <= share * slo.ttft_s
    return keeps_ttft and (not slo.tpot_s or placement.tpot_s <= share * slo.tpot_s)


def _excess(ratio: F) -> F:
    return (ratio - 1) * (ratio > 1)
