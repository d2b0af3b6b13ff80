"""Draws a random token per row: temperature, filters, then the inverse CDF of one number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.request import Request
from pdserve.engine.sampling.filters import filter_weights
from pdserve.engine.sampling.inverse_cdf import invert_cdf
from pdserve.engine.sampling.uniform import uniforms
from pdserve.engine.sampling.weights import relative_weights


def draw_tokens(logits: Tensor, peaks: Tensor, requests: Sequence[Request]) -> list[int]:
    """Draw a token for each request, from its parameters, its seed and its position.

    Args:
        logits: [num_requests, vocab_size] float32.
        peaks: [num_requests], the largest logit of each row, finite.
        requests: one per row, none of them greedy.
    """
    params = [request.sampling for request in requests]
    numbers = torch.from_numpy(
        uniforms([p.seed for p in params], [request.num_tokens for request in requests])
    ).to(logits.device)
    weights = relative_weights(logits, peaks, params)
    token_ids = [0] * len(requests)
    for candidates in filter_weights(weights, params):
        drawn = invert_cdf(candidates.weights, numbers[candidates.rows])
        if candidates.token_ids is not None:
            drawn = candidates.token_ids.gather(1, drawn[:, None])[:, 0]
        for row, token_id in zip(candidates.rows, drawn.tolist(), strict=True):
            token_ids[row] = token_id
    return token_ids
