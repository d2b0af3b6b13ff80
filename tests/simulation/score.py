"""Scores what users saw, as DistServe does: TTFT, TPOT, gaps, attainment, goodput.

TTFT is the time from arrival to token 1. TPOT is the mean gap after token 1. The transfer of the KV
to the decode node and the wait for room there fall between tokens 1 and 2, and so into TPOT.
Attainment is joint (TTFT and TPOT both met) and counts all calls: those that were refused or never
ended have missed their targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from tests.simulation.workload import Call


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of one call."""

    call: Call
    was_refused: bool = False
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0  # of the prompt, on the node that prefilled it

    @property
    def has_ended(self) -> bool:
        return len(self.token_times_s) == self.call.num_output

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.call.at_s if self.token_times_s else inf

    @property
    def tpot_s(self) -> float:
        """Mean gap after token 1: 0 with a single token, infinite if the call did not end."""
        if not self.has_ended:
            return inf
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def longest_stall_s(self) -> float:
        """Longest gap in the middle of the answer; the first gap belongs to the handoff."""
        return max(self.gaps_s[1:], default=0.0)

    @property
    def keeps_ttft(self) -> bool:
        promised_s = self.call.slo.ttft_s
        return self.has_ended and (not promised_s or self.ttft_s <= promised_s)

    @property
    def keeps_tpot(self) -> bool:
        promised_s = self.call.slo.tpot_s
        return self.has_ended and (not promised_s or self.tpot_s <= promised_s)


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
        return num_cached / sum(len(outcome.call.token_ids) for outcome in self.served)

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
