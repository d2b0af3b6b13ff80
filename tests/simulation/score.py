"""Scores what users saw, as DistServe does: TTFT, TPOT, gaps, attainment, goodput.

Attainment is joint (TTFT and TPOT both met) and counts all calls: those that were refused or never
ended have missed their targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster, Front
from pdserve.commands.simulation.outcome import Outcome


def scored(cluster: Cluster, front: Front, calls: Iterable[Call]) -> Score:
    """Simulate these calls until all have ended; return their score, in the order of the calls."""
    in_order = list(calls)
    seen: dict[str, Outcome] = {}

    def note(outcome: Outcome) -> None:
        seen[outcome.call.call_id] = outcome

    cluster.run(front, in_order, note)
    return Score([seen[call.call_id] for call in in_order])


def gaps_s(outcome: Outcome) -> list[float]:
    """Return the gaps between the tokens of a call (ITL)."""
    return [after - before for before, after in pairwise(outcome.token_times_s)]


class Score:
    """The score of a set of calls."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes
        self.served = [outcome for outcome in outcomes if outcome.has_ended]

    def where(self, condition: Callable[[Call], bool]) -> Score:
        """Return the score of the calls that meet the condition."""
        return Score([outcome for outcome in self.outcomes if condition(outcome.call)])

    def of_class(self, name: str) -> Score:
        return self.where(lambda call: call.slo.name == name)

    @property
    def num_refused(self) -> int:
        return sum(outcome.was_refused for outcome in self.outcomes)

    # ---- promises ------------------------------------------------------------------------------

    @property
    def ttft_attainment(self) -> float:
        return self._share(keeps_ttft)

    @property
    def tpot_attainment(self) -> float:
        return self._share(keeps_tpot)

    @property
    def attainment(self) -> float:
        return self._share(lambda outcome: keeps_ttft(outcome) and keeps_tpot(outcome))

    @property
    def goodput(self) -> float:
        """Calls that met both targets, per second of arrivals."""
        times = [outcome.call.at_s for outcome in self.outcomes]
        return self.attainment * len(times) / (max(times) - min(times))

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in a prefix cache."""
        num_cached = sum(outcome.num_cached_tokens for outcome in self.served)
        return num_cached / sum(outcome.call.prompt.num_tokens for outcome in self.served)

    # ---- times ---------------------------------------------------------------------------------

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean([outcome.ttft_s for outcome in self.served]))

    @property
    def mean_tpot_s(self) -> float:
        return float(np.mean([outcome.tpot_s for outcome in self.served]))

    def ttft_s(self, percentile: float) -> float:
        return float(np.percentile([outcome.ttft_s for outcome in self.served], percentile))

    def tpot_s(self, percentile: float) -> float:
        return float(np.percentile([outcome.tpot_s for outcome in self.served], percentile))

    def gap_s(self, percentile: float) -> float:
        """Return a percentile of all gaps between tokens, of all calls together (ITL)."""
        gaps = [gap for outcome in self.served for gap in gaps_s(outcome)]
        return float(np.percentile(gaps, percentile))

    def stalled_share(self, longer_than_s: float) -> float:
        """Return the share of answers with a stall longer than this in the middle."""
        return self._share(lambda outcome: _longest_stall_s(outcome) > longer_than_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, from the first arrival to the last token."""
        first_s = min(outcome.call.at_s for outcome in self.outcomes)
        last_s = max(outcome.token_times_s[-1] for outcome in self.served)
        return sum(len(outcome.token_times_s) for outcome in self.served) / (last_s - first_s)

    def _share(self, condition: Callable[[Outcome], bool]) -> float:
        return sum(map(condition, self.outcomes)) / len(self.outcomes)


def keeps_ttft(outcome: Outcome) -> bool:
    """Return whether a call has ended and met the promised TTFT."""
    promised_s = outcome.call.slo.ttft_s
    return outcome.has_ended and (not promised_s or outcome.ttft_s <= promised_s)


def keeps_tpot(outcome: Outcome) -> bool:
    """Return whether a call has ended and met the promised TPOT."""
    promised_s = outcome.call.slo.tpot_s
    return outcome.has_ended and (not promised_s or outcome.tpot_s <= promised_s)


def _longest_stall_s(outcome: Outcome) -> float:
    """Return the longest gap in the middle of an answer; the first one belongs to the handoff."""
    return max(gaps_s(outcome)[1:], default=0.0)
