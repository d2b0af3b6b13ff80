"""Rules of one idea each: first come first served, shortest first, and similar lengths together."""

from __future__ import annotations

from pdserve.engine.prompts.order import PromptRule, QueuedPrompt, due_s
from pdserve.engine.request import Request
from pdserve.measured.perf_model import PerfModel


class Arrival(PromptRule):
    """Order by time of receipt. A started prompt is finished first, within its priority."""

    gives_way = False

    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
        """Return the prompts oldest first."""
        return sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s)

    def served(self, request: Request, seconds: float) -> None:
        """Do nothing: this order does not depend on past service."""


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

    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
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

    def _time_s(self, prompt: QueuedPrompt) -> float:
        num_cached = prompt.request.num_tokens - prompt.num_uncached
        return self._perf.prefill_s(prompt.num_uncached, num_cached, self._token_budget)


SMALLEST = 64  # tokens; shorter prompts share one bucket


class Buckets(PromptRule):
    """One bucket per power of two of uncached tokens (BucketServe), oldest first in each.

    The bucket whose oldest prompt is due first goes first. A step takes prompts of one bucket only,
    so that a short prompt is never delayed by sharing a step with a long one.
    """

    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
        """Return the prompts bucket by bucket."""
        buckets: dict[int, list[QueuedPrompt]] = {}
        for prompt in sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s):
            bucket = bucket_of(prompt.num_uncached)
            in_bucket = QueuedPrompt(prompt.request, prompt.num_uncached, bucket)
            buckets.setdefault(bucket, []).append(in_bucket)
        ordered = sorted(buckets.values(), key=lambda bucket: due_s(bucket[0].request))
        return [prompt for bucket in ordered for prompt in bucket]

    def served(self, request: Request, seconds: float) -> None:
        """Do nothing: this order does not depend on past service."""


def bucket_of(num_tokens: int) -> int:
    """Return the exponent of the smallest power of two that is at least `num_tokens`."""
    return (max(num_tokens, SMALLEST) - 1).bit_length()
