"""Is there a place in a decode batch? The one rule of node policies, router, admission and holding.

A batch has a place for one more request if, with it, all have a row, the step takes no more than
`aimed_s` of every promise in it, and there is KV for it until its end. A request alone always has a
place: keeping it out would not make it faster.

Node policies ask about the batch of now (`decode_node/policies/`), and have its KV reserved by
`Queues.reserve`. The coordinator asks about batches to come, which csrc/routing goes over for all
nodes: `Node::has_place` says the rule again in C++, and a property test feeds both the same cases.
Router, waiting and holding (`Newcomer.view`) get its answers from there, and admission gets them as
predicted times.
"""

from __future__ import annotations

from math import inf
from typing import Final

SAFETY: Final = 0.9  # share of a promise to plan for; the rest is a margin for prediction errors


def aimed_s(promised_s: float) -> float:
    """Return the time to plan for where so much is promised; infinite for 0, which is no promise.

    A batch that aims at this makes up for a wait with the part of each promise that is left.
    """
    return SAFETY * promised_s or inf


def has_place(
    num_requests: float, max_batch_size: int, step_s: float, limit_s: float, *, has_kv: bool = True
) -> bool:
    """Return whether a batch has a place for a newcomer.

    Args:
        num_requests: of the batch with the newcomer. A fraction: some skip steps.
        max_batch_size: the rows of a step.
        step_s: predicted time of a step of this batch.
        limit_s: the longest that its step should take, for any of its requests; may be infinite.
        has_kv: whether there is room for the newcomer's KV.
    """
    if num_requests <= 1:
        return True
    return num_requests <= max_batch_size and step_s <= limit_s and has_kv
