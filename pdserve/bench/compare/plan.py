"""How much a comparison measures. Light to import: every `pdserve` command loads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pdserve.config import Mode

COLOCATED: Final[Mode] = "colocated"


class Tuning(msgspec.Struct, frozen=True):
    """One way to set up the co-located mode."""

    local_chunk: int  # most prompt tokens in a step with decodes; 0: what the TPOT allows
    one_node: bool = False  # one node with all cores, else as many nodes as other modes

    @property
    def text(self) -> str:
        """Description for people: "one node, chunks as TPOT allows"."""
        chunks = f"chunks of {self.local_chunk}" if self.local_chunk else "chunks as TPOT allows"
        return f"{'one node' if self.one_node else 'several nodes'}, {chunks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """What a comparison measures, and for how long."""

    modes: Sequence[Mode]
    tunings: Sequence[Tuning]  # to try when co-located; at least one
    ttft_s: float  # TTFT target; 0: derived from the idle clusters,
    tpot_s: float
    ttft_scale: float  # as a multiple of their latencies; 0: the case's own
    tpot_scale: float
    target: float
    seed: int
    rates: Sequence[float]  # ascending; empty: chosen by the ladder
    most_rates: int
    duration_s: float  # of each run, at least
    least_requests: int  # of each run
    idle_requests: int  # least number sent to an idle cluster
    warm_up: int  # requests after each start
    budget_s: float  # for everything
