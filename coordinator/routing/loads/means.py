"""What requests were like that have finished lately: the load that a plan for the next is for."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import Final

from coordinator.routing.placement import Placement
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S
from pdserve.protocol import Slo

MEMORY: Final = 256  # requests that means are about
LATE: Final = 0.1  # share of requests whose prompts may wait for too long


@dataclass(slots=True)
class RequestMeans:
    """What the last requests were like, on average."""

    count: int = 0
    uncached: float = 0.0  # tokens of a prompt that were computed
    squared: float = 0.0  # of these, the mean square
    prompt: float = 0.0  # tokens
    output: float = 0.0  # tokens of the answer
    # Promised, or usual: harmonic means, as it is the tight promises that are broken.
    ttft_s: float = inf
    tpot_s: float = inf

    def note(self, placement: Placement, slo: Slo, num_output: int) -> None:
        """Note a request that has finished."""
        self.count += 1
        weight = 1 / min(self.count, MEMORY)
        self.uncached += weight * (placement.uncached_tokens - self.uncached)
        self.squared += weight * (placement.uncached_tokens**2 - self.squared)
        self.prompt += weight * (placement.prompt_tokens - self.prompt)
        self.output += weight * (max(1, num_output) - self.output)
        self.ttft_s = 1 / ((1 - weight) / self.ttft_s + weight / (slo.ttft_s or USUAL_TTFT_S))
        self.tpot_s = 1 / ((1 - weight) / self.tpot_s + weight / (slo.tpot_s or USUAL_TPOT_S))

    @property
    def context(self) -> float:
        """Tokens that a stream reads at a step, on average over its life."""
        return self.prompt + self.output / 2

    @property
    def dispersion(self) -> float:
        """The squared coefficient of variation of prompts' work."""
        return max(0.0, self.squared / self.uncached**2 - 1)

    def is_late(self, prompts_per_s: float, prompt_s: float, own_s: float, servers: int) -> bool:
        """Return whether too many prompts would be late.

        `prompt_s`: of one server's time that a prompt takes; `own_s`: from its begin to token 1.
        """
        share = prompts_per_s * prompt_s / servers
        if share >= 1:
            return True
        spare_s = max(0.0, self.ttft_s - own_s * (1 + sqrt(self.dispersion)))
        mean_wait_s = prompt_s * (1 + self.dispersion) / (2 * servers * (1 - share))
        return share * exp(-spare_s / mean_wait_s) > LATE
