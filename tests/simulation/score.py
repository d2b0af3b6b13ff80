"""Scores what users saw, as DistServe does: TTFT, TPOT, gaps, attainment, goodput.

Attainment is joint (TTFT and TPOT both met) and counts all calls: those that were refused or never
ended have missed their targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
        return self._share(lambda outcome: outcome.keeps_ttft)

    @property
    def tpot_attainment(self) -> float:
        return self._share(lambda outcome: outcome.keeps_tpot)

    @property
    def attainment(self) -> float:
        return self._share(lambda outcome: outcome.keeps_ttft and outcome.keeps_tpot)

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
        gaps = [gap for outcome in self.served for gap in outcome.gaps_s]
        return float(np.percentile(gaps, percentile))

    def stalled_share(self, longer_than_s: float) -> float:
        """Return the share of answers with a stall longer than this in the middle."""
        return self._share(lambda outcome: outcome.longest_stall_s > longer_than_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, from the first arrival to the last token."""
        first_s = min(outcome.call.at_s for outcome in self.outcomes)
        last_s = max(outcome.token_times_s[-1] for outcome in self.served)
        return sum(len(outcome.token_times_s) for outcome in self.served) / (last_s - first_s)

    def _share(self, condition: Callable[[Outcome], bool]) -> float:
        return sum(map(condition, self.outcomes)) / len(self.outcomes)
