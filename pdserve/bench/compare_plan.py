"""How much a comparison measures. Light to import: every `pdserve` command loads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.config import Mode

COLOCATED: Final[Mode] = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """How much is measured."""

    modes: Sequence[Mode]
    chunks: Sequence[int]  # local chunks to try when co-located; 0: what the TPOT allows
    ttft_s: float  # promised; 0: follows from the idle clusters,
    tpot_s: float
    ttft_scale: float  # as a multiple of what they do; 0: the subject's own
    tpot_scale: float
    target: float
    seed: int
    rates: Sequence[float]  # ascending; empty: as the ladder says
    most_rates: int
    duration_s: float  # of each run, at least
    least_requests: int  # of each run
    idle_requests: int  # to an idle cluster, at least
    warm_up: int  # requests after each start
    budget_s: float  # for everything
