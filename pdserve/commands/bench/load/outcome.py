"""Outcomes of requests, as their client saw them. Definitions as in DistServe (OSDI'24).

* TTFT is the time of the first token less the time at which the request was *due*, so a late client
  does not hide latency. TTFT from the actual time of sending is reported as well.
* TPOT is (last token - first token) / (tokens - 1), and 0 for one token. The time between tokens 1
  and 2, such as the handoff to a decode node, counts.
* ITL is each gap between two tokens. Tokens that arrive in one piece have gaps of 0 between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from typing import Literal

import msgspec
import numpy as np

_TOGETHER = 0.1  # of the mean gap between tokens,
_TOGETHER_S = 0.0005  # but shorter than a step of any model: one long wait raises the mean

_KEPT_UP_MS = 50.0  # limit on a client's own lag
_KEPT_UP_SHARE = 0.1  # limit, as a share of the TTFT target

End = Literal["finished", "refused", "failed", "unfinished"]


class Outcome(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times in seconds since the start of the run."""

    kind: str
    due_s: float
    num_prompt: int
    num_output: int  # tokens asked for
    sent_s: float = 0.0
    arrivals_s: list[float] = []  # of pieces: one token each, or more if the server is behind
    num_received: int = 0  # tokens
    num_prompt_counted: int = 0  # prompt tokens by the server's count; 0: not reported
    end: End = "unfinished"
    error: str = ""  # error of refused or failed requests
    prefill_node: str = ""
    decode_node: str = ""
    digest: str = ""  # of what was answered, unless it broke off
    format: str = ""  # the `system_fingerprint` that came with it

    @property
    def late_s(self) -> float:
        """How late the client itself sent the request."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time from the due time to token 1; infinite without a token."""
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else inf

    @property
    def ttft_sent_s(self) -> float:
        """Time from the actual sending to token 1; infinite without a token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else inf

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens; infinite if the request did not finish."""
        if self.end != "finished":
            return inf
        if self.num_received < 2:
            return 0.0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_received - 1)

    @property
    def e2e_s(self) -> float:
        """Time from the due time to the last token; infinite if the request did not finish."""
        return self.arrivals_s[-1] - self.due_s if self.end == "finished" else inf

    @property
    def gaps_s(self) -> list[float]:
        """All gaps between two tokens received so far."""
        gaps = [later - earlier for earlier, later in pairwise(self.arrivals_s)]
        together = self.num_received - len(self.arrivals_s)
        return gaps + [0.0] * max(0, together)

    def num_moments(self, wait_s: float) -> int:
        """Return how many times something came, at least one; without a longer wait, each token.

        What came within a tenth of the mean gap, and half a millisecond, came together.
        """
        waits_s = [later - earlier for earlier, later in pairwise(self.arrivals_s)]
        if max(waits_s, default=0.0) <= wait_s:
            return self.num_received
        least_s = min(_TOGETHER_S, _TOGETHER * sum(waits_s) / (self.num_received - 1))
        return 1 + sum(waited_s > least_s for waited_s in waits_s)


class Promise(msgspec.Struct, frozen=True):
    """The latency targets of every request."""

    ttft_s: float
    tpot_s: float

    def num_in_time(self, outcome: Outcome) -> float:
        """Return how many tokens came no later than with a steady stream that just keeps this.

        A mean hides what comes in bursts. Pieces are taken to have equally many tokens.
        """
        if not outcome.arrivals_s:
            return 0.0
        each = max(1.0, outcome.num_received / len(outcome.arrivals_s))
        first_s, in_time = outcome.due_s + self.ttft_s, 0.0
        for number, arrival_s in enumerate(outcome.arrivals_s):
            start = number * each
            due = round((arrival_s - first_s) / self.tpot_s, 6)  # tokens before this one are late
            in_time += each - min(each, max(0.0, ceil(due - start)))
        return in_time

    def factor(self, outcome: Outcome) -> float:
        """Return the factor on both targets at which this request would just meet them."""
        if outcome.end != "finished":
            return inf
        return max(outcome.ttft_s / self.ttft_s, outcome.tpot_s / self.tpot_s)

    def is_measured(self, late_ms: float) -> bool:
        """Whether a client tells if it is kept whose own lag is this, at the 99th percentile.

        Otherwise the times that it sees are partly its own.
        """
        return late_ms <= min(_KEPT_UP_MS, 1e3 * _KEPT_UP_SHARE * self.ttft_s)


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of times in milliseconds, linear between observations; None without any.

    With fewer than 100 observations, p99 lies between the largest two.
    """

    count: int  # of observations
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Compute percentiles without infinite times (no token, no end), which counts report."""
        finite = [second for second in seconds if second != inf]
        if not finite:
            return cls(0, None, None, None)
        p50, p90, p99 = (float(p) * 1e3 for p in np.percentile(finite, (50, 90, 99)))
        return cls(len(finite), p50, p90, p99)

    def text(self, digits: int) -> str:
        """Return p50/p90/p99, with so many digits behind the point."""
        values = (self.p50, self.p90, self.p99)
        return "/".join("-" if value is None else f"{value:.{digits}f}" for value in values)
