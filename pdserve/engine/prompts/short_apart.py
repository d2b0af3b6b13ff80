"""`laps`: short and long prompts apart, and a window in which short ones gather (LAPS)."""

from __future__ import annotations

from pdserve.engine.prompts.order import BatchSizes, PromptRule, QueuedPrompt
from pdserve.engine.request import Request
from pdserve.measured.perf_model import PerfModel

_SHORT, _LONG = 0, 1  # batches: no step has both


class ShortApart(PromptRule):
    """Steps of short prompts between chunks of long ones, oldest first in both.

    A prompt is short if it does not saturate the machine: alone it would pay for weights that
    others could share. So short ones wait for each other, while there are long ones to compute:
    until they saturate a step together, or the oldest has waited as long as such a step takes. When
    they have had as much time as a chunk of a long prompt takes, one is computed, so that neither
    kind starves.
    """

    def __init__(self, perf: PerfModel, token_budget: int) -> None:
        self._perf = perf
        self._token_budget = token_budget
        self._sizes = BatchSizes(perf, token_budget, 0, gives_way=True)
        self._short_s = 0.0  # of short prompts since the last chunk of a long one

    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
        """Return one kind and then the other."""
        short: list[QueuedPrompt] = []
        long: list[QueuedPrompt] = []
        for prompt in sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s):
            is_long = self._is_long(prompt.request, prompt.num_uncached)
            kind = QueuedPrompt(prompt.request, prompt.num_uncached, _LONG if is_long else _SHORT)
            (long if is_long else short).append(kind)
        return short + long if self._are_due(short, now_s) or not long else long + short

    def served(self, request: Request, seconds: float) -> None:
        """Note what each kind got."""
        self._short_s = 0.0 if self._is_long(request, 0) else self._short_s + seconds

    def _are_due(self, short: list[QueuedPrompt], now_s: float) -> bool:
        if not short or self._short_s >= self._step_s(self._sizes.chunk):
            return False
        full, oldest = self._sizes.batch_tokens, short[0].request.lifecycle.received_s
        if sum(prompt.num_uncached for prompt in short) >= full:
            return True
        return now_s - oldest >= self._step_s(full)

    def _is_long(self, request: Request, num_uncached: int) -> bool:
        """Whether a prompt is long; one that has begun stays what it was then."""
        if request.block_table:
            num_uncached = request.num_tokens - request.num_cached_tokens
        return num_uncached >= self._sizes.batch_tokens

    def _step_s(self, num_tokens: int) -> float:
        return self._perf.prefill_s(num_tokens, 0, self._token_budget)
