"""Token 1 of several answers to one prompt, all sampled from the logits of its last token.

A request's siblings are not rows of a step. Once the logits of the request's row are computed, they
are copied for the siblings, so the model computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from msgspec.structs import replace
from torch import Tensor

from pdserve.engine.request import Request, SampledToken

_SIBLINGS = attrgetter("siblings")  # evaluated for each row of each step, so not in Python


def fan_out(logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Sequence[Request]]:
    """Repeat logits for siblings: [num_requests, vocab_size] -> [num_answers, vocab_size].

    Also returns the request that each row of the result belongs to.
    """
    if not any(map(_SIBLINGS, requests)):
        return logits, requests
    owners = [row for row, request in enumerate(requests) for _ in request.answers]
    return logits[owners], [answer for request in requests for answer in request.answers]


def fan_in(sampled: list[SampledToken], requests: Sequence[Request]) -> list[SampledToken]:
    """Undo `fan_out`: return one token per request, with the tokens of its siblings attached."""
    if len(sampled) == len(requests):
        return sampled
    tokens = iter(sampled)
    return [
        replace(token, siblings=tuple(islice(tokens, len(request.siblings))))
        for request in requests
        for token in islice(tokens, 1)
    ]
