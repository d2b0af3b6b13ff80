"""How much slack a promise leaves for the work of other requests, and how much of it they use.

slack of a promise = the promised time - the time the request takes on idle nodes
use of that slack  = the time that other requests are predicted to add * a learned factor

A prediction that is right on average is too low for half of the requests. So the factor tracks a
quantile of real / predicted instead of the mean: it grows when a real time exceeds prediction times
factor, and shrinks otherwise. The ratio of the two steps makes it settle where `QUANTILE` of the
real times are within it (stochastic approximation; Robbins and Monro).
"""

from __future__ import annotations

from math import inf

import msgspec
from msgspec import structs

from coordinator.admission.decisions import PredictedTimes, Reason
from coordinator.generation import GenerationRequest
from pdserve.protocol import Slo

_JUST_OVERDUE_S = -1e-9  # stands for exactly nothing left: 0 means that nothing was promised


def has_promise(slo: Slo) -> bool:
    """Return whether a TTFT or a TPOT is promised."""
    return bool(slo.ttft_s or slo.tpot_s)


def is_possible(slo: Slo, predicted: PredictedTimes) -> bool:
    """Return whether there is a promise, and idle nodes could keep all of it."""
    keeps_ttft = not slo.ttft_s or slo.ttft_s > predicted.idle_ttft_s
    keeps_tpot = not slo.tpot_s or slo.tpot_s > predicted.idle_tpot_s
    return has_promise(slo) and keeps_ttft and keeps_tpot


def without_promise(slo: Slo, lowest_priority: int) -> Slo:
    """Return the Slo without its promise, at `lowest_priority` at most.

    An Slo without a promise is returned unchanged.
    """
    if not has_promise(slo):
        return slo
    priority = min(slo.priority, lowest_priority)
    return structs.replace(slo, ttft_s=0.0, tpot_s=0.0, hold_s=0.0, priority=priority)


def promise_left(request: GenerationRequest, deadline_s: float, elapsed_s: float) -> Slo:
    """Return what is left of a request's promise `elapsed_s` after its start.

    `deadline_s` also counts from the start; the promise counts from receipt.
    """
    slo, waited_s = request.slo, request.waited_s + elapsed_s
    return structs.replace(
        slo,
        ttft_s=_left_s(slo.ttft_s, waited_s),
        hold_s=_left_s(slo.hold_s, waited_s),
        deadline_s=_left_s(deadline_s, elapsed_s),
    )


def left_of(admitted: Slo, left: Slo) -> Slo:
    """Return `left` if a promise was admitted; else the admitted Slo, with the deadline left."""
    return left if has_promise(admitted) else structs.replace(admitted, deadline_s=left.deadline_s)


def _left_s(promised_s: float, elapsed_s: float) -> float:
    if promised_s == 0:
        return 0.0
    left_s = promised_s - elapsed_s
    return left_s if left_s != 0 else _JUST_OVERDUE_S


QUANTILE = 0.9  # SLO attainment is commonly asked for at 90 % (DistServe)
STEP = 0.05
LOWEST = 0.7  # bounds, so that a few outliers neither admit nor refuse everything
HIGHEST = 2.0
# Nodes fill their batches up to 0.9 of a promised TPOT and admit no more (`tpot-cap`), so a request
# that waits for a place can make up for it with the last tenth. A larger margin here, driven by the
# slowest tenth of the requests, would refuse requests whose promise would have been kept.
HIGHEST_TPOT_MARGIN = 1.25
TELLING_SHARE = 0.1  # share of a promise that others must use before a margin learns from it


class Slack(msgspec.Struct, frozen=True):
    """The slack of one promise, in seconds."""

    reason: Reason
    promised_s: float
    idle_s: float
    used_s: float
    slack_s: float

    def exceeds(self, share: float) -> bool:
        """Return whether more than this share of the slack is used."""
        return self.used_s > self.slack_s * share


class Margin:
    """The factor for predictions of one kind."""

    def __init__(self, highest: float = HIGHEST) -> None:
        self.factor = 1.0
        self._highest = highest

    def learn(self, predicted_s: float, real_s: float) -> None:
        """Update the factor with a predicted and a real time."""
        exceeded = real_s > predicted_s * self.factor
        self.factor *= 1 + STEP * (QUANTILE if exceeded else QUANTILE - 1)
        self.factor = min(max(self.factor, LOWEST), self._highest)


class ClassSlack:
    """The slack of one class, from predictions, and the factors learned to correct these."""

    def __init__(self) -> None:
        self.ttft_margin = Margin()
        self.tpot_margin = Margin(HIGHEST_TPOT_MARGIN)

    def ttft(self, promised_s: float, predicted: PredictedTimes) -> Slack:
        """Return the slack of a promised TTFT; infinite means no promise."""
        idle_s = predicted.idle_ttft_s
        used_s = self.ttft_margin.factor * max(0.0, predicted.ttft_s - idle_s)
        return Slack("ttft", promised_s, idle_s, used_s, max(0.0, promised_s - idle_s))

    def tpot(self, promised_s: float, predicted: PredictedTimes) -> Slack:
        """Return the slack of a TPOT promised to the request or to others in its batch.

        Infinite means no promise.
        """
        idle_s = predicted.idle_tpot_s
        used_s = self.tpot_margin.factor * max(0.0, predicted.tpot_s - idle_s)
        return Slack("tpot", promised_s, idle_s, used_s, max(0.0, promised_s - idle_s))

    def queue_s(self, predicted: PredictedTimes) -> float:
        """Return the time that other requests add to the TTFT."""
        return self.ttft(inf, predicted).used_s

    def learn_ttft(self, promised_s: float, predicted: PredictedTimes, real_s: float) -> None:
        """Learn from a request with this prediction whose token 1 arrived after `real_s`."""
        _learn(self.ttft_margin, promised_s, predicted.ttft_s, predicted.idle_ttft_s, real_s)

    def learn_tpot(self, promised_s: float, predicted: PredictedTimes, real_s: float) -> None:
        """Learn from a request with this prediction whose TPOT was `real_s`."""
        _learn(self.tpot_margin, promised_s, predicted.tpot_s, predicted.idle_tpot_s, real_s)


def _learn(
    margin: Margin, promised_s: float, predicted_s: float, idle_s: float, real_s: float
) -> None:
    """Update a margin if other requests had a large enough part in the prediction."""
    if promised_s > 0 and predicted_s - idle_s >= TELLING_SHARE * promised_s:
        margin.learn(predicted_s - idle_s, real_s - idle_s)
