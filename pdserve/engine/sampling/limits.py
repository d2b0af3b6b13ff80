"""Where sampling changes its kind: from random to greedy, from logits to no distribution."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.request import Request
from pdserve.errors import UnusableLogits

# Below it, dividing by the temperature would only lose precision.
GREEDY_BELOW = 1e-5


def unusable(requests: Sequence[Request]) -> UnusableLogits:
    """The error for requests whose logits, or states, are not finite."""
    request_ids = [request.request_id for request in requests]
    why = "its weights, or the KV it read, are damaged"
    if any(request.sampling.grammar or request.sampling.min_tokens for request in requests):
        why += "; or the grammar, or 'min_tokens', leaves no token that it can choose: ask for less"
    return UnusableLogits(
        f"the model's outputs for {', '.join(request_ids)} are not finite: {why}", request_ids
    )
