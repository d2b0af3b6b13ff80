"""What a user saw of one call.

TTFT is the time from arrival to token 1. TPOT is the mean gap after token 1. The transfer of the KV
to the decode node and the wait for room there fall between tokens 1 and 2, and so into TPOT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pdserve.commands.simulation.call import Call
from pdserve.lifecycle import Lifecycle


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of one call."""

    call: Call
    sent_s: float = 0.0  # when its client had sent it
    was_refused: bool = False
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0  # of the prompt, on the node that prefilled it
    at_prefill: Lifecycle | None = None  # on the node that computed token 1
    at_decode: Lifecycle | None = None  # on the node that computed the last one

    @property
    def has_ended(self) -> bool:
        """Whether all its tokens are there."""
        return len(self.token_times_s) == self.call.num_output

    @property
    def ttft_s(self) -> float:
        """Seconds until token 1; infinite without one."""
        return self.token_times_s[0] - self.call.at_s if self.token_times_s else inf

    @property
    def tpot_s(self) -> float:
        """Mean gap after token 1: 0 with a single token, infinite if the call did not end."""
        if not self.has_ended:
            return inf
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
