"""What it costs to pull KV, learned from what was done here, beside what it costs to compute it.

A pull is a line, `seconds = fixed + slope x bytes`: a latency and a rate. It starts from a guess
that a few observations outweigh. It forgets the old ones with every new one, so it follows a
machine whose load changes; it forgets a little as well whenever a pull is declined. What was slow
once is thus tried again, if the guess speaks for it, though nothing new can be seen of what nobody
uses. What computing costs is the node's performance model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.perf_model import PerfModel
from pdserve.protocol import TransferCosts

FORGET = 0.95  # the weight of an observation when one more has come, or a pull was declined
GUESS_WEIGHT = 0.01  # of each of the guess's two points; never forgotten

# A guess, good until there is something better: ten-gigabit Ethernet.
PULL_FIXED_S = 0.005
PULL_BYTES_PER_S = 1e9
PULL_GUESS_BYTES = 1 << 20
MOST_BYTES_PER_S = 1e13  # of a line whose slope is nothing


class Line:
    """`seconds = fixed + slope x amount`, neither negative, by least squares with forgetting."""

    def __init__(self, fixed: float, slope: float, typical_amount: float) -> None:
        """From a guess, as if it had been observed at 0 and at `typical_amount`."""
        guessed = (_point(x, fixed + slope * x, GUESS_WEIGHT) for x in (0.0, typical_amount))
        self._guess = [sum(values) for values in zip(*guessed, strict=True)]
        self._seen = [0.0] * len(self._guess)

    def observe(self, amount: float, seconds: float) -> None:
        """It took so long."""
        self.age()
        new = _point(amount, seconds, 1.0)
        self._seen = [a + b for a, b in zip(self._seen, new, strict=True)]

    def age(self) -> None:
        """What was seen counts a little less beside the guess, and beside what will be seen."""
        self._seen = [FORGET * value for value in self._seen]

    @property
    def is_guess(self) -> bool:
        """Whether nothing has been observed yet."""
        return not any(self._seen)

    def predict(self, amount: float) -> float:
        """Seconds for this amount."""
        fixed, slope = self.solve()
        return fixed + slope * amount

    def solve(self) -> tuple[float, float]:
        """(fixed, slope)"""
        w, x, y, xx, xy = (a + b for a, b in zip(self._guess, self._seen, strict=True))
        slope = (w * xy - x * y) / (w * xx - x * x)  # the guess's two points keep it from 0
        if slope < 0:
            return y / w, 0.0
        fixed = (y - slope * x) / w
        return (fixed, slope) if fixed > 0 else (0.0, xy / xx)


def _point(x: float, y: float, weight: float) -> list[float]:
    """What a weighted point adds to the sums of 1, x, y, x * x and x * y."""
    return [weight, weight * x, weight * y, weight * x * x, weight * x * y]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Two ways to come by the KV of the same tokens."""

    pull_s: float
    compute_s: float


def is_worth_pulling(forecast: Forecast) -> bool:
    """The policy: whichever is done sooner."""
    return forecast.pull_s < forecast.compute_s


def patience_s(forecast: Forecast) -> float:
    """How long to wait for a pull before computing after all.

    Twice as long as computing takes: a source that hangs then costs no more than that much time,
    and one that is slower than expected still has its chance.
    """
    return 2 * forecast.compute_s


class Costs:
    """Of one node. A transport that has not been used yet is guessed at."""

    def __init__(self, perf: PerfModel, token_budget: int) -> None:
        self.perf = perf
        self._token_budget = token_budget
        self._pulls: dict[str, Line] = {}  # by transport
        self._on_pull: Callable[[], None] = lambda: None

    def on_pull(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever something was learned about a transport."""
        self._on_pull = listener

    def observe_pull(self, transport: str, num_bytes: int, seconds: float) -> None:
        """A pull was made, from the question to the last byte."""
        self._pull_line(transport).observe(num_bytes, seconds)
        self._on_pull()

    def observe_at_least(self, transport: str, num_bytes: int, seconds: float) -> None:
        """A pull was given up or failed after so long: news only if it was to have ended before."""
        if seconds > self._pull_line(transport).predict(num_bytes):
            self.observe_pull(transport, num_bytes, seconds)

    def declined(self, transport: str) -> None:
        """A pull was not made because of its forecast, which nobody can now put right."""
        self._pull_line(transport).age()

    def forecast(self, transport: str, num_bytes: int, num_tokens: int) -> Forecast:
        """For a prefix of so many tokens, whose KV has so many bytes."""
        return Forecast(
            pull_s=self._pull_line(transport).predict(num_bytes),
            compute_s=self.perf.prefill_s(num_tokens, 0, self._token_budget),
        )

    def transfers(self) -> list[TransferCosts]:
        """What is known of the transports that were used (of the host tier, too)."""
        known = {name: line.solve() for name, line in self._pulls.items() if not line.is_guess}
        return [
            TransferCosts(
                transport=name,
                fixed_s=fixed,
                bytes_per_s=1 / max(slope, 1 / MOST_BYTES_PER_S),
            )
            for name, (fixed, slope) in known.items()
        ]

    def _pull_line(self, transport: str) -> Line:
        line = self._pulls.get(transport)
        if line is None:
            line = Line(PULL_FIXED_S, 1 / PULL_BYTES_PER_S, PULL_GUESS_BYTES)
            self._pulls[transport] = line
        return line
