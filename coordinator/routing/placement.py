"""Where a request is to run, and what that is predicted to mean for it."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.prefix_index import Hits
from coordinator.registry import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A decision of the router's. Seconds from the decision on; 0 where nothing is known.

    Nothing is known of nodes that have not reported yet what they can do.
    """

    prefill: Member | None  # None: the decode node prefills for itself
    decode: Member | None  # None: a single token is all that is wanted
    ttft_s: float
    tpot_s: float  # mean gap behind token 1: the handover and a wait for room are in it
    wait_s: float  # for a place in the decode batch, when token 1 has been computed
    held_s: float  # of it: token 1 is held back, so it is part of the TTFT and not of the TPOT
    idle_ttft_s: float  # the same if the nodes had nothing else to do
    idle_tpot_s: float
    prompt_tokens: int
    uncached_tokens: int  # of the prompt: to be computed where it is prefilled
    output_tokens: int  # expected
    hits: Hits  # who holds what of the prompt
    shares_prefill: bool = False  # the prompt is computed there for another answer to it

    @property
    def queue_s(self) -> float:
        """Of the TTFT: what goes before the prompt."""
        return self.ttft_s - self.idle_ttft_s

    @property
    def side(self) -> str:
        """Who does the work: "pair", "local" or "prefill"; for people and metrics."""
        if self.prefill is None:
            return "local"
        return "pair" if self.decode is not None else "prefill"
