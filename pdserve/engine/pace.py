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
    began_s = _first_token_s(request)
    if began_s is None:
        return inf
    return began_s + len(request.output_token_ids) * tpot_s(request, default_tpot_s)


def tpot_s(request: Request, default_tpot_s: float) -> float:
    """The promise, or what is aimed at without one."""
    promised_s = request.targets.tpot_s
    return promised_s if promised_s < inf else default_tpot_s


def _first_token_s(request: Request) -> float | None:
    """When token 1 was there: sampled here, or, as closely as is known, elsewhere."""
    lifecycle = request.lifecycle
    return lifecycle.prefill_end_s if lifecycle.first_token_s is None else lifecycle.first_token_s
