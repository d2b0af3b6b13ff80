"""When a sequence ends. The words for it at the API are the coordinator's business."""

from __future__ import annotations

from pdserve.engine.request import Request
from pdserve.protocol import FinishReason


def finish(request: Request, eos_token_ids: frozenset[int]) -> None:
    """Set `finish_reason` and `stop_token_id` if the newest output token ends the request.

    Called once after each token is appended. A token that both ends the sequence and is the last
    one allowed is a STOP: the model was done.

    Args:
        request: with at least one output token.
        eos_token_ids: of the model; not looked at when the request ignores them.
    """
    sampling = request.sampling
    token_id = request.output_token_ids[-1]
    num_output_tokens = len(request.output_token_ids)
    is_ending = token_id in sampling.stop_token_ids or (  # as `ending_token_ids`, without the set
        token_id in eos_token_ids and not sampling.ignore_eos
    )
    if is_ending and num_output_tokens >= sampling.min_tokens:
        request.finish_reason = FinishReason.STOP
        request.stop_token_id = token_id
    elif num_output_tokens >= sampling.max_tokens:
        request.finish_reason = FinishReason.LENGTH


def ending_token_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end this request, once it has `min_tokens` of output."""
    sampling = request.sampling
    stop_token_ids = frozenset(sampling.stop_token_ids)
    return stop_token_ids if sampling.ignore_eos else stop_token_ids | eos_token_ids
