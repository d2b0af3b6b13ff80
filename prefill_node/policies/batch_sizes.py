"""How many tokens of prompts a step takes."""

from __future__ import annotations

from pdserve.perf_model import PerfModel

CHUNK = 2  # times what saturates: a chunk is read again by all later ones, so it is not too small


class BatchSizes:
    """Token counts that follow from the node's performance model, and from its config."""

    def __init__(
        self, perf: PerfModel, token_budget: int, prefill_chunk: int, *, gives_way: bool
    ) -> None:
        """
        Args:
            perf: what steps take; its costs may be replaced.
            token_budget: most tokens of a step.
            prefill_chunk: most tokens of a prompt in a step; 0: automatic.
            gives_way: whether a prompt gives way to others between chunks; if not, they are as
                large as possible.
        """
        self._perf = perf
        self._token_budget = token_budget
        self._prefill_chunk = prefill_chunk
        self._gives_way = gives_way
        self._measure()

    @property
    def batch_tokens(self) -> int:
        """L_m: whole prompts together, no more than are needed to saturate the machine."""
        self._follow()
        return self._batch_tokens

    @property
    def chunk(self) -> int:
        """Of a prompt alone."""
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
