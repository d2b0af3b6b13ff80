"""Shortest prompt first, with ageing."""

from __future__ import annotations

from pdserve.engine.prompts.order import Prompt, PromptRule, due_s
from pdserve.engine.request import Request
from pdserve.perf_model import PerfModel

SHORTEST_PROMISE_S = 0.1  # lower limit on the TTFT target; requests may arrive overdue
MAX_WAIT_S = 30.0  # prompts that waited longer go first, oldest first


class ShortestFirst(PromptRule):
    """Order by predicted time minus weighted waiting time (TetriInfer's SJF, with ageing).

    The weight is chosen such that the longest prompt here precedes any new one after waiting for
    half of its TTFT target: T - w * target / 2 = 0. So a steady flow of short prompts does not
    delay others for much longer than that. In overload all prompts are old, and shorter ones still
    go first; but only up to `MAX_WAIT_S`, so that none starves.
    """

    def __init__(self, perf: PerfModel, token_budget: int) -> None:
        self._perf = perf
        self._token_budget = token_budget

    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """Return the prompts by remaining time after ageing, the least first."""
        times_s = [self._time_s(prompt) for prompt in prompts]
        longest_s = max(times_s)
        keys = []
        for prompt, time_s in zip(prompts, times_s, strict=True):
            received_s = prompt.request.lifecycle.received_s
            waited_s = now_s - received_s
            promise_s = max(due_s(prompt.request) - received_s, SHORTEST_PROMISE_S)
            weight = longest_s / (promise_s / 2)
            is_starving = waited_s > MAX_WAIT_S
            keys.append(
                (not is_starving, received_s if is_starving else time_s - weight * waited_s)
            )
        return [prompts[i] for i in sorted(range(len(prompts)), key=keys.__getitem__)]

    def served(self, request: Request, seconds: float) -> None:
        """Do nothing: this order does not depend on past service."""

    def _time_s(self, prompt: Prompt) -> float:
        num_cached = prompt.request.num_tokens - prompt.num_uncached
        return self._perf.prefill_s(prompt.num_uncached, num_cached, self._token_budget)
