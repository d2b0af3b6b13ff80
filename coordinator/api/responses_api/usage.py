"""Tokens of a call, in the words of responses."""

from __future__ import annotations

from coordinator.api import responses
from coordinator.api.responses_api.objects import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)


def response_usage(usage: responses.Usage, num_reasoning_tokens: int) -> ResponseUsage:
    """As chat counts them, and how many of them were for reasoning."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
