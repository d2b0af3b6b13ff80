"""Where a request will run, and the predicted latencies."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.nodes.registry import Member
from coordinator.prefixes.index import Hits


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A decision of the router. Times are in seconds from the decision; 0 means unknown.

    Times are unknown for nodes that have not reported a profile yet.
    """

    prefill: Member | None  # None: the decode node prefills the prompt itself
    decode: Member | None  # None: only a single token is wanted
    ttft_s: float
    tpot_s: float  # mean gap after token 1, including the handoff and a wait for room
    wait_s: float  # for a place in the decode batch, after token 1 has been computed
    held_s: float  # part of wait_s for which token 1 is held back: in the TTFT, not in the TPOT
    idle_ttft_s: float  # TTFT and TPOT if the nodes had nothing else to do
    idle_tpot_s: float
    prompt_tokens: int
    uncached_tokens: int  # prompt tokens that the prefilling node does not hold
    output_tokens: int  # expected
    hits: Hits  # which nodes hold how much of the prompt
    shares_prefill: bool = False  # the prompt is computed for another answer, or was for the stream

    @property
    def queue_s(self) -> float:
        """The part of the TTFT that is spent behind other work."""
        return self.ttft_s - self.idle_ttft_s

    @property
    def revision(self) -> str:
        """The revision that its nodes serve."""
        node = self.decode or self.prefill
        assert node is not None
        return node.hello.revision

    @property
    def side(self) -> str:
        """Which nodes do the work: "pair", "local" or "prefill"; for people and metrics."""
        if self.prefill is None:
            return "local"
        return "pair" if self.decode is not None else "prefill"
