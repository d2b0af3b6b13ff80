"""When a request's next token is due, according to its TTFT and TPOT targets.

TPOT is a mean over the whole answer. So a stream that was fast so far is ahead of schedule and has
slack: token n + 1 is due n target gaps after token 1, whenever token n was produced.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from pdserve.engine.request import Request
from pdserve.rules.batch import SAFETY


def next_due_s(request: Request, default_tpot_s: float = inf) -> float:
    """Return when the next token is due; infinity if the request has no target for it.

    Args:
        request: decoding, or on its way to token 1.
        default_tpot_s: for requests without a TPOT target.
    """
    if not request.output_token_ids:
        return request.targets.first_token_s
    began_s, num_before = shown_s(request), 0
    if began_s is None:  # it goes on here: its leg says when its first token of this node is due
        began_s, num_before = request.targets.first_token_s, request.num_emitted_before
    num_gaps = len(request.output_token_ids) - num_before
    return began_s + num_gaps * tpot_s(request, default_tpot_s) if num_gaps else began_s


def step_limit_s(streams: Iterable[Request], now_s: float, default_tpot_s: float) -> float:
    """Return how long a step that decodes these streams may take; infinity for none.

    That is the pace that is aimed at, or less for a stream that is behind its schedule. Time that
    one is ahead is not spent: it is for steps that take longer than predicted.
    """
    return min(
        (
            min(SAFETY * tpot_s(stream, default_tpot_s), next_due_s(stream, default_tpot_s) - now_s)
            for stream in streams
        ),
        default=inf,
    )


def tpot_s(request: Request, default_tpot_s: float) -> float:
    """Return the request's TPOT target, or the default if it has none."""
    promised_s = request.targets.tpot_s
    return promised_s if promised_s < inf else default_tpot_s


def shown_s(request: Request, now_s: float = -inf) -> float | None:
    """Return when the client received token 1, or None if unknown.

    If token 1 was sampled on another node, this is an estimate: while the request waits for room
    here, token 1 is assumed to be held back as long as its targets allow. The coordinator does so
    once a request has waited for a while (`coordinator/routing/loads/books.py`). `now_s` is needed
    for requests that are still waiting.
    """
    lifecycle = request.lifecycle
    if lifecycle.first_token_s is not None or lifecycle.prefill_end_s is None:
        return lifecycle.first_token_s
    waited_until_s = lifecycle.room_wait[1] if lifecycle.room_wait else now_s
    return max(lifecycle.prefill_end_s, min(waited_until_s, request.targets.held_until_s))
