"""The shape of a planned step, from which its time is predicted."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.request import Scheduled
from pdserve.measured.perf_model import StepShape, chunk_pairs


def shape_of(rows: Sequence[Scheduled]) -> StepShape:
    """Return the shape of a plan. The requests must be as they are before the step."""
    num_tokens = num_sampled = pairs = context = 0
    for request, num_row_tokens in rows:
        num_tokens += num_row_tokens
        num_before = request.num_computed_tokens
        num_output = len(request.output_token_ids)
        num_uncomputed = len(request.prompt_token_ids) + num_output - num_before
        num_sampled += num_row_tokens == num_uncomputed and request.sampling.max_tokens > 0
        if request.sampling.prompt_logprobs is not None and not num_output:
            last = len(request.prompt_token_ids) - 1
            num_sampled += min(num_before + num_row_tokens, last) - num_before
        if num_output and num_uncomputed == 1:  # it is decoding
            context += num_before + 1
        else:
            pairs += chunk_pairs(num_row_tokens, num_before)
    return StepShape(num_tokens, num_sampled, pairs, context)
