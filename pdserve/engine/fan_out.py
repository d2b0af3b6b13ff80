"""Token 1 of several answers to one prompt: each is sampled from the logits of its last token.

A request's siblings are no rows of a step. The logits of its row are copied for them when they are
there, so the model computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from msgspec.structs import replace
from torch import Tensor

from pdserve.engine.request import Request, SampledToken

_SIBLINGS = attrgetter("siblings")  # asked for each row of each step, so not in Python


def fan_out(logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Sequence[Request]]:
    """[num_requests, vocab_size] -> [num_answers, vocab_size], and whose each of these rows is."""
    if not any(map(_SIBLINGS, requests)):
        return logits, requests
    owners = [row for row, request in enumerate(requests) for _ in request.answers]
    return logits[owners], [answer for request in requests for answer in request.answers]


def fan_in(sampled: list[SampledToken], requests: Sequence[Request]) -> list[SampledToken]:
    """One token for each request again, which has those of its siblings with it."""
    if len(sampled) == len(requests):
        return sampled
    tokens = iter(sampled)
    return [
        replace(token, siblings=tuple(islice(tokens, len(request.siblings))))
        for request in requests
        for token in islice(tokens, 1)
    ]
