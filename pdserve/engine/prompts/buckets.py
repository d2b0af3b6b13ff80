"""Prompts of about equal length together."""

from __future__ import annotations

from pdserve.engine.prompts.order import Prompt, PromptRule, due_s
from pdserve.engine.request import Request

SMALLEST = 64  # tokens: shorter prompts are all alike


class Buckets(PromptRule):
    """A bucket for each power of two of uncached tokens (BucketServe), oldest first in each.

    The bucket whose oldest prompt is due first goes first, and a step takes of one bucket only: a
    short prompt never waits for the end of a long one's step, or lends it time.
    """

    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """Bucket by bucket."""
        buckets: dict[int, list[Prompt]] = {}
        for prompt in sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s):
            bucket = bucket_of(prompt.num_uncached)
            in_bucket = Prompt(prompt.request, prompt.num_uncached, bucket)
            buckets.setdefault(bucket, []).append(in_bucket)
        ordered = sorted(buckets.values(), key=lambda bucket: due_s(bucket[0].request))
        return [prompt for bucket in ordered for prompt in bucket]

    def served(self, request: Request, seconds: float) -> None:
        """Their order does not depend on it."""


def bucket_of(num_tokens: int) -> int:
    """The power of two that so many tokens fit into."""
    return (max(num_tokens, SMALLEST) - 1).bit_length()
