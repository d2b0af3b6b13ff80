"""Predicts what pulling KV costs, from past pulls, and compares it with computing the KV.

The cost of a pull is a line, `seconds = fixed + slope x bytes`, fitted per transport. It starts
from a guess that a few observations outweigh. Each new observation reduces the weight of the older
ones, so the line follows a changing load. Declining a pull reduces their weight as well: otherwise
a transport that was slow once would never be tried, and so never be observed, again. The cost of
computing comes from the node's performance model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.kv import KvLayout
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import TransferCosts
from pdserve.settings.prefixes import PrefixPull
from pdserve.shared.clock import Clock

FORGET = 0.95  # factor on the weight of past observations, per new one and per declined pull
GUESS_WEIGHT = 0.01  # of each of the guess's two points; does not decay

# The guess: ten-gigabit Ethernet.
PULL_FIXED_S = 0.005
PULL_BYTES_PER_S = 1e9
PULL_GUESS_BYTES = 1 << 20
MOST_BYTES_PER_S = 1e13  # reported for a line of slope 0

PATIENCE = 2  # times what something should take, until it is given up


class CostLine:
    """`seconds = fixed + slope x amount`: least squares with forgetting; neither is negative."""

    def __init__(self, fixed: float, slope: float, typical_amount: float) -> None:
        """Start from a guess, as if it had been observed at 0 and at `typical_amount`."""
        guessed = (_point(x, fixed + slope * x, GUESS_WEIGHT) for x in (0.0, typical_amount))
        self._guess = [sum(values) for values in zip(*guessed, strict=True)]
        self._seen = [0.0] * len(self._guess)

    def observe(self, amount: float, seconds: float) -> None:
        """Add an observation."""
        self.age()
        new = _point(amount, seconds, 1.0)
        self._seen = [a + b for a, b in zip(self._seen, new, strict=True)]

    def age(self) -> None:
        """Reduce the weight of all observations, relative to the guess and to future ones."""
        self._seen = [FORGET * value for value in self._seen]

    @property
    def is_guess(self) -> bool:
        """Whether nothing has been observed yet."""
        return not any(self._seen)

    def predict(self, amount: float) -> float:
        """Predicted seconds for this amount."""
        fixed, slope = self.solve()
        return fixed + slope * amount

    def solve(self) -> tuple[float, float]:
        """Fit the line: (fixed, slope)."""
        w, x, y, xx, xy = (a + b for a, b in zip(self._guess, self._seen, strict=True))
        slope = (w * xy - x * y) / (w * xx - x * x)  # never / 0: the guess has two points
        if slope < 0:
            return y / w, 0.0
        fixed = (y - slope * x) / w
        return (fixed, slope) if fixed > 0 else (0.0, xy / xx)


def _point(x: float, y: float, weight: float) -> list[float]:
    """A weighted point's contribution to the sums of 1, x, y, x * x and x * y."""
    return [weight, weight * x, weight * y, weight * x * x, weight * x * y]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times of the two ways to obtain the KV of the same tokens."""

    pull_s: float
    compute_s: float


def is_worth_pulling(forecast: Forecast) -> bool:
    """Whether pulling is predicted to be faster than computing."""
    return forecast.pull_s < forecast.compute_s


def patience_s(forecast: Forecast) -> float:
    """How long to wait for a pull before computing after all.

    Twice the time of computing: this bounds the cost of a source that hangs, and still lets one
    finish that is slower than predicted.
    """
    return PATIENCE * forecast.compute_s


class PullCosts:
    """The costs of one node, per transport; for an unused transport they are a guess."""

    def __init__(self, perf: PerfModel, token_budget: int) -> None:
        self.perf = perf
        self._token_budget = token_budget
        self._pulls: dict[str, CostLine] = {}  # by transport
        self._listeners: list[Callable[[str, int, float], object]] = []

    def on_pull(self, listener: Callable[[str, int, float], object]) -> None:
        """Call `listener` with each observation: the transport, the bytes, and the seconds."""
        self._listeners.append(listener)

    def observe_pull(self, transport: str, num_bytes: int, seconds: float) -> None:
        """Learn from a complete pull; `seconds` is from the query to the last byte."""
        self._pull_line(transport).observe(num_bytes, seconds)
        for listener in self._listeners:
            listener(transport, num_bytes, seconds)

    def observe_at_least(self, transport: str, num_bytes: int, seconds: float) -> None:
        """Learn from a pull that failed after `seconds`, if it should have been done by then."""
        if seconds > self._pull_line(transport).predict(num_bytes):
            self.observe_pull(transport, num_bytes, seconds)

    def deadline_s(self, transport: str, num_bytes: int, least_s: float) -> float:
        """How long a pull may take: twice as long as such pulls have taken, at least `least_s`."""
        return max(least_s, PATIENCE * self._pull_line(transport).predict(num_bytes))

    def declined(self, transport: str) -> None:
        """A pull was not made because of its forecast, so the forecast cannot be corrected."""
        self._pull_line(transport).age()

    def forecast(self, transport: str, num_bytes: int, num_tokens: int) -> Forecast:
        """Forecast for a prefix of `num_tokens` tokens with `num_bytes` of KV."""
        return Forecast(
            pull_s=self._pull_line(transport).predict(num_bytes),
            compute_s=self.perf.prefill_s(num_tokens, 0, self._token_budget),
        )

    def knows(self, transport: str) -> bool:
        """Whether a pull has been observed."""
        return transport in self._pulls and not self._pulls[transport].is_guess

    def transfers(self) -> list[TransferCosts]:
        """The learned costs of every transport that was used, including the host tier."""
        known = {name: line.solve() for name, line in self._pulls.items() if not line.is_guess}
        return [
            TransferCosts(
                transport=name,
                fixed_s=fixed,
                bytes_per_s=1 / max(slope, 1 / MOST_BYTES_PER_S),
            )
            for name, (fixed, slope) in known.items()
        ]

    def _pull_line(self, transport: str) -> CostLine:
        line = self._pulls.get(transport)
        if line is None:
            line = CostLine(PULL_FIXED_S, 1 / PULL_BYTES_PER_S, PULL_GUESS_BYTES)
            self._pulls[transport] = line
        return line


log = logging.getLogger(__name__)


class PrefixWorth:
    """`PullCosts` per block of this node. Asked before each fetch, and updated after it."""

    def __init__(
        self,
        costs: PullCosts,
        layout: KvLayout,
        clock: Clock,
        pull: PrefixPull,
        longest_s: float = math.inf,
    ) -> None:
        """`longest_s`: for which a source keeps what it has offered."""
        self._longest_s = longest_s
        self._costs = costs
        self._layout = layout
        self._clock = clock
        self._is_always = pull == "always"

    def deadline_s(self, transport: str, num_blocks: int, timeout_s: float) -> float:
        """How long a pull of these blocks may take: `timeout_s`, or longer if such pulls do."""
        num_bytes = num_blocks * self._layout.block_bytes
        longest_s = max(timeout_s, self._longest_s)
        return min(longest_s, self._costs.deadline_s(transport, num_bytes, timeout_s))

    def patience_s(self, transports: Iterable[str], num_blocks: int, timeout_s: float) -> float:
        """How long a fetch of these blocks may take by any of these; not much over computing."""
        deadlines_s = [self.deadline_s(each, num_blocks, timeout_s) for each in transports]
        longest_s = max(deadlines_s, default=timeout_s)
        if self._is_always:
            return longest_s
        return min(longest_s, patience_s(self._forecast("", num_blocks)))

    def pays(self, transport: str, num_blocks: int, num_saved: int | None = None) -> bool:
        """Whether fetching these blocks is predicted to be faster than computing them.

        Or so many blocks of tokens, if they save others. Transport "" stands for one that is not
        known yet.
        """
        forecast = self._forecast(transport, num_blocks, num_saved)
        is_in_time = forecast.pull_s < self._longest_s
        pays = self._is_always or (is_in_time and is_worth_pulling(forecast))
        log.debug(
            "%d blocks: %.4f s to pull by %s, %.4f s to compute: %s",
            num_blocks,
            forecast.pull_s,
            transport or "a transport not known yet",
            forecast.compute_s,
            "pull" if pays else "compute",
        )
        if not pays:
            self.declined(transport)
        return pays

    def is_cheaper(self, transport: str, num_blocks: int) -> bool:
        """As `pays`, for something that is not decided by it."""
        return self._is_always or is_worth_pulling(self._forecast(transport, num_blocks))

    def declined(self, transport: str) -> None:
        """A fetch was not made because of its forecast."""
        self._costs.declined(transport)

    def knows(self, transport: str) -> bool:
        """Whether a fetch has been observed."""
        return self._costs.knows(transport)

    def fetch_s(self, transport: str, num_blocks: int) -> float:
        """How long it is predicted to take to fetch these blocks; 0 if that does not matter."""
        return 0.0 if self._is_always else self._forecast(transport, num_blocks).pull_s

    def share_s(self, share: float, num_blocks: int) -> float:
        """So much of the time to compute these blocks; without end if that does not matter."""
        return math.inf if self._is_always else share * self._forecast("", num_blocks).compute_s

    def now_s(self) -> float:
        """When what `learn` is told of begins."""
        return self._clock.now()

    def learn(self, transport: str, num_blocks: int, num_wanted: int, started_s: float) -> None:
        """Learn from an attempt to fetch `num_wanted` blocks, which got `num_blocks`; 0: failed."""
        seconds = self._clock.now() - started_s
        block_bytes = self._layout.block_bytes
        if num_blocks > 0:
            self._costs.observe_pull(transport, num_blocks * block_bytes, seconds)
        else:
            self._costs.observe_at_least(transport, num_wanted * block_bytes, seconds)

    def _forecast(self, transport: str, num_blocks: int, num_saved: int | None = None) -> Forecast:
        layout = self._layout
        num_bytes = num_blocks * layout.block_bytes
        num_tokens = layout.tokens_in(num_blocks if num_saved is None else num_saved)
        return self._costs.forecast(transport, num_bytes, num_tokens)
