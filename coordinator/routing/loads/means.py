"""What the last requests were like: the load that a plan for the next ones is for.

A prompt is known when its request begins; the first answers to end are the short ones. So the mean
length of an answer is that of all tokens, those of running requests among them, for each request
that ended: right where a request is as likely to end at one token as at another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, exp, inf, pi, sqrt
from typing import Final, Protocol

from coordinator.generation import GenerationRequest
from coordinator.routing.placement import Placement

MEMORY: Final = 256  # requests that means are about
LATE: Final = 0.1  # share of requests whose prompts may wait for too long
_FAR: Final = 8.0  # standard deviations, beyond which nobody waits


class Begun(Protocol):
    """A request that has been dispatched."""

    request: GenerationRequest
    placement: Placement

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""


@dataclass(slots=True)
class RequestMeans:
    """What the last requests were like, on average."""

    num_begun: int = 0
    num_ended: int = 0
    uncached: float = 0.0  # tokens of a prompt that were computed
    squared: float = 0.0  # of these, the mean square
    prompt: float = 0.0  # tokens
    # Promised: harmonic means, as it is the tight promises that are broken.
    ttft_s: float = inf
    tpot_s: float = inf
    # As of the last `update`:
    output: float = 0.0  # tokens of the answer
    context: float = 0.0  # tokens that a step reads for a stream
    # Requests under way, and how many of their tokens have been counted.
    _running: dict[Begun, int] = field(default_factory=dict)
    # Lately:
    _answers: float = 0.0  # that have ended
    _tokens: float = 0.0  # of answers
    _read: float = 0.0  # tokens read for these

    def began(self, begun: Begun) -> None:
        """Note a request that has been dispatched; one that goes on has no new prompt."""
        self._running[begun] = begun.num_tokens
        if begun.num_tokens:
            return
        self.num_begun += 1
        placement, slo = begun.placement, begun.request.slo
        uncached = 0 if placement.shares_prefill else placement.uncached_tokens
        weight = 1 / min(self.num_begun, MEMORY)
        self.uncached += weight * (uncached - self.uncached)
        self.squared += weight * (uncached**2 - self.squared)
        self.prompt += weight * (placement.prompt_tokens - self.prompt)
        self.ttft_s = _harmonic(self.ttft_s, slo.ttft_s, weight)
        self.tpot_s = _harmonic(self.tpot_s, slo.tpot_s, weight)

    def ended(self, begun: Begun) -> None:
        """Note a request that has ended. One without a token says nothing of answers."""
        self._count(begun)
        del self._running[begun]
        if not begun.num_tokens:
            return
        self.num_ended += 1
        keep = 1 - 1 / MEMORY
        self._answers = keep * self._answers + 1
        self._tokens *= keep
        self._read *= keep

    def update(self) -> None:
        """Count the tokens that running requests have got."""
        for begun in self._running:
            self._count(begun)
        self.output = max(1.0, self._tokens / max(1.0, self._answers))
        self.context = self._read / max(1.0, self._tokens)

    def _count(self, begun: Begun) -> None:
        counted, num_tokens = self._running[begun], begun.num_tokens
        self._running[begun] = num_tokens
        self._tokens += num_tokens - counted
        length = begun.placement.prompt_tokens + (counted + num_tokens) / 2
        self._read += (num_tokens - counted) * length

    @property
    def dispersion(self) -> float:
        """The squared coefficient of variation of prompts' work."""
        return max(0.0, self.squared / self.uncached**2 - 1)

    def is_late(self, prompts_per_s: float, prompt_s: float, own_s: float, servers: int) -> bool:
        """Return whether too many prompts would be late: those that the mean token is in.

        `prompt_s`: of one server's time that a prompt takes; `own_s`: from its begin to token 1.
        """
        share = prompts_per_s * prompt_s / servers
        if share >= 1:
            return True
        spare_s = max(0.0, self.ttft_s - own_s * (1 + self.dispersion))
        mean_wait_s = prompt_s * (1 + self.dispersion) / (2 * servers * (1 - share))
        return share * exp(-spare_s / mean_wait_s) > LATE

    def waits(self, streams_per_s: float, ends_per_s: float, places: float, pace_s: float) -> bool:
        """Return whether too many streams would wait for a place for too long.

        With all places taken, each has a token every `pace_s`, and so many end a second. How many
        wait: Erlang C, as Halfin and Whitt (1981) approximate it.
        """
        share = streams_per_s / ends_per_s
        if share >= 1:
            return True
        spread = min((1 - share) * sqrt(places), _FAR)
        above = 0.5 * erfc(spread / sqrt(2))
        wait_share = 1 / (1 + spread * (1 - above) * sqrt(2 * pi) * exp(spread**2 / 2))
        spare_s = self.ttft_s + max(0.0, self.tpot_s - pace_s) * self.output
        return wait_share * exp(-(ends_per_s - streams_per_s) * spare_s) > LATE


def _harmonic(mean_s: float, promised_s: float, weight: float) -> float:
    """Return the mean with one more promise; without promises, it is infinite."""
    one = (1 - weight) / mean_s + (weight / promised_s if promised_s else 0.0)
    return 1 / one if one else inf
