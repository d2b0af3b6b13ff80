"""How many prompt tokens a step of prompts takes."""

from __future__ import annotations

from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts

CHUNK = 2  # times the saturating size: all later chunks read a chunk again, so it is not too small


class BatchSizes:
    """Token counts derived from the node's performance model and its config."""

    def __init__(
        self, perf: PerfModel, token_budget: int, prefill_chunk: int, *, gives_way: bool
    ) -> None:
        """
        Args:
            perf: the performance model; its costs may be replaced.
            token_budget: most tokens of a step.
            prefill_chunk: most tokens of a prompt in a step; 0: automatic.
            gives_way: whether a prompt gives way to others between chunks; if not, chunks are as
                large as possible.
        """
        self._perf = perf
        self._token_budget = token_budget
        self._prefill_chunk = prefill_chunk
        self._gives_way = gives_way
        self._costs: StepCosts | None = None  # that the sizes are for
        self._chunk = self._batch_tokens = 0

    @property
    def batch_tokens(self) -> int:
        """L_m: most tokens of several prompts in a step, no more than saturate the machine."""
        self._follow()
        return self._batch_tokens

    @property
    def chunk(self) -> int:
        """Most tokens of the first prompt in a step."""
        self._follow()
        return self._chunk

    def _follow(self) -> None:
        if self._costs is not self._perf.costs:
            self._measure()

    def _measure(self) -> None:
        self._costs = self._perf.costs
        saturating = self._perf.saturating_tokens(self._token_budget)
        wanted = self._prefill_chunk or (
            CHUNK * saturating if self._gives_way else self._token_budget
        )
        self._chunk = min(wanted, self._token_budget)
        self._batch_tokens = min(saturating, self._chunk)
