"""When a request's next token is due: what was promised, as a point in time.

TPOT is a mean over the whole answer. So a stream that was fast so far is ahead of its schedule, and
that time is in hand: token n + 1 is due n promised gaps behind token 1, whenever token n came.
"""

from __future__ import annotations

from math import inf

from pdserve.engine.request import Request

SAFETY = 0.9  # of a promise is aimed at; the rest is for what no prediction sees


def next_due_s(request: Request, default_tpot_s: float = inf) -> float:
    """Point in time; infinity: nothing was promised.

    Args:
        request: decoding, or on its way to token 1.
        default_tpot_s: for those that were promised no TPOT.
    """
    if not request.output_token_ids:
        return request.targets.first_token_s
    began_s = shown_s(request)
    if began_s is None:
        return inf
    return began_s + len(request.output_token_ids) * tpot_s(request, default_tpot_s)


def tpot_s(request: Request, default_tpot_s: float) -> float:
    """The promise, or what is aimed at without one."""
    promised_s = request.targets.tpot_s
    return promised_s if promised_s < inf else default_tpot_s


def shown_s(request: Request, now_s: float = -inf) -> float | None:
    """When the client saw token 1: sampled here, or, as closely as is known, elsewhere.

    While it waits for a place here, token 1 is taken to be held back as long as it may be: the
    coordinator does so once somebody has waited for a while (`coordinator/routing/holding.py`).
    `now_s` is for those that wait.
    """
    lifecycle = request.lifecycle
    if lifecycle.first_token_s is not None or lifecycle.prefill_end_s is None:
        return lifecycle.first_token_s
    waited_until_s = lifecycle.room_wait[1] if lifecycle.room_wait else now_s
    return max(lifecycle.prefill_end_s, min(waited_until_s, request.targets.held_until_s))
