"""Token 1 of several answers to one prompt, all sampled from the logits of its last token.

A request's siblings are not rows of a step. They are sampled from the logits of the request's row,
so the model computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from msgspec.structs import replace

from pdserve.engine.request import Request, SampledToken

_SIBLINGS = attrgetter("siblings")  # evaluated for each row of each step, so not in Python


def fan_out(requests: Sequence[Request]) -> tuple[Sequence[Request], list[int] | None]:
    """Return all answers to sample: of each request its own, then its siblings'.

    Also returns for each answer the row of logits, as an index into `requests`; None if there are
    no siblings.
    """
    if not any(map(_SIBLINGS, requests)):
        return requests, None
    owners = [row for row, request in enumerate(requests) for _ in request.answers]
    return [answer for request in requests for answer in request.answers], owners


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
