"""Limits of sampling: when it becomes greedy, and errors when no token can be chosen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.request import Request
from pdserve.shared.errors import NoTokenLeft, RequestsFailed, UnusableLogits

# Below it, dividing by the temperature would only lose precision.
GREEDY_BELOW = 1e-5


def unusable(requests: Sequence[Request]) -> UnusableLogits:
    """Return the error for requests whose logits or states are not finite."""
    request_ids = _ids(requests)
    return UnusableLogits(
        f"the model's outputs for {', '.join(request_ids)} are not finite: its weights, or the KV "
        "it read, are damaged",
        request_ids,
    )


def nothing_to_choose(logits: Tensor, requests: Sequence[Request]) -> RequestsFailed:
    """Return the error for rows in which no token can be chosen.

    If some rows have logits that are not finite, the error names only these requests; the others
    are sampled again. Otherwise the requests' own parameters leave no token.

    Args:
        logits: [num_requests, vocab_size], as computed by the model.
        requests: one per row.
    """
    usable = logits.amax(dim=-1).isfinite().tolist()  # amax propagates NaN
    damaged = [request for request, ok in zip(requests, usable, strict=True) if not ok]
    return unusable(damaged) if damaged else none_left(requests)


def none_left(requests: Sequence[Request]) -> NoTokenLeft:
    """Return the error for requests whose own parameters leave no token."""
    request_ids = _ids(requests)
    return NoTokenLeft(
        "no token can be chosen: the grammar, 'allowed_token_ids', 'bad_words', 'min_tokens', "
        "biases and penalties leave none that this model has; ask for less",
        request_ids,
    )


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]
