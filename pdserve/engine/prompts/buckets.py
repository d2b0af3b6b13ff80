"""Serves prompts of similar length together."""

from __future__ import annotations

from pdserve.engine.prompts.order import Prompt, PromptRule, due_s
from pdserve.engine.request import Request

SMALLEST = 64  # tokens; shorter prompts share one bucket


class Buckets(PromptRule):
    """One bucket per power of two of uncached tokens (BucketServe), oldest first in each.

    The bucket whose oldest prompt is due first goes first. A step takes prompts of one bucket only,
    so that a short prompt is never delayed by sharing a step with a long one.
    """

    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """Return the prompts bucket by bucket."""
        buckets: dict[int, list[Prompt]] = {}
        for prompt in sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s):
            bucket = bucket_of(prompt.num_uncached)
            in_bucket = Prompt(prompt.request, prompt.num_uncached, bucket)
            buckets.setdefault(bucket, []).append(in_bucket)
        ordered = sorted(buckets.values(), key=lambda bucket: due_s(bucket[0].request))
        return [prompt for bucket in ordered for prompt in bucket]

    def served(self, request: Request, seconds: float) -> None:
        """Do nothing: this order does not depend on past service."""


def bucket_of(num_tokens: int) -> int:
    """Return the exponent of the smallest power of two that is at least `num_tokens`."""
    return (max(num_tokens, SMALLEST) - 1).bit_length()
