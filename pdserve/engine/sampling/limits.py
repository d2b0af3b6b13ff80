"""Where sampling changes its kind: from random to greedy, from logits to no distribution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.request import Request
from pdserve.errors import NoTokenLeft, RequestsFailed, UnusableLogits

# Below it, dividing by the temperature would only lose precision.
GREEDY_BELOW = 1e-5


def unusable(requests: Sequence[Request]) -> UnusableLogits:
    """The error for requests whose logits, or states, are not finite."""
    request_ids = _ids(requests)
    return UnusableLogits(
        f"the model's outputs for {', '.join(request_ids)} are not finite: its weights, or the KV "
        "it read, are damaged",
        request_ids,
    )


def nothing_to_choose(logits: Tensor, requests: Sequence[Request]) -> RequestsFailed:
    """The error for rows in which no token can be chosen: whose fault that is.

    Where it is the model's for some, these are named alone; the others are sampled again.

    Args:
        logits: [num_requests, vocab_size] as the model gave them.
        requests: whose.
    """
    usable = logits.amax(dim=-1).isfinite().tolist()  # a NaN is the largest of all
    damaged = [request for request, ok in zip(requests, usable, strict=True) if not ok]
    if damaged:
        return unusable(damaged)
    request_ids = _ids(requests)
    return NoTokenLeft(
        f"no token can be chosen for {', '.join(request_ids)}: its grammar, 'min_tokens', biases "
        "and penalties leave none that this model has; ask for less",
        request_ids,
    )


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]
