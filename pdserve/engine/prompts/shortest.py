"""Shortest prompt first, and older ones become shorter."""

from __future__ import annotations

from pdserve.engine.prompts.order import Prompt, PromptRule, due_s
from pdserve.engine.request import Request
from pdserve.perf_model import PerfModel

SHORTEST_PROMISE_S = 0.1  # of those that come overdue
MAX_WAIT_S = 30.0  # after it, the oldest goes first


class ShortestFirst(PromptRule):
    """By predicted time, less what a prompt has waited times a weight (TetriInfer's SJF, aged).

    The weight is such that the longest prompt here would go before any new one, once it had waited
    for half of the promise: T - w * promise / 2 = 0. So short prompts that keep coming do not make
    others wait for much longer than that. When more comes than can be served, all are old, and
    shorter ones still go first; for a while, so that nobody starves.
    """

    def __init__(self, perf: PerfModel, token_budget: int) -> None:
        self._perf = perf
        self._token_budget = token_budget

    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """The least remaining time, after ageing, first."""
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
        """Their order does not depend on it."""

    def _time_s(self, prompt: Prompt) -> float:
        num_cached = prompt.request.num_tokens - prompt.num_uncached
        return self._perf.prefill_s(prompt.num_uncached, num_cached, self._token_budget)
