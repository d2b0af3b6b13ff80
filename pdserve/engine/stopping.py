"""When a sequence ends. The coordinator maps this to the API's finish reasons."""

from __future__ import annotations

from pdserve.engine.request import Request
from pdserve.protocol import FinishReason


def finish(request: Request, eos_token_ids: frozenset[int]) -> None:
    """Set `finish_reason` and `stop_token_id` if the newest output token ends the request.

    To be called after appending a token that may end the request. If a stop token is also the last
    token allowed, the reason is STOP: the model was done.

    Args:
        request: with at least one output token.
        eos_token_ids: of the model; ignored if the request sets `ignore_eos`.
    """
    sampling = request.sampling
    token_id = request.output_token_ids[-1]
    num_output_tokens = len(request.output_token_ids)
    is_ending = token_id in sampling.stop_token_ids or (
        token_id in eos_token_ids and not sampling.ignore_eos
    )
    if is_ending and num_output_tokens >= sampling.min_tokens:
        request.finish_reason = FinishReason.STOP
        request.stop_token_id = token_id
    elif num_output_tokens >= sampling.max_tokens:
        request.finish_reason = FinishReason.LENGTH
