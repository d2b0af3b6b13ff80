"""Token counts of a call, as the Responses API reports them."""

from __future__ import annotations

from coordinator.api.answer import bodies as responses
from coordinator.api.responses.objects import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)


def response_usage(usage: responses.Usage, num_reasoning_tokens: int) -> ResponseUsage:
    """Convert chat's token counts, and add the number of reasoning tokens."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
