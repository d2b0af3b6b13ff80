"""What an Slo promises: whether anything, whether it can be kept at all, and what is left of it."""

from __future__ import annotations

from msgspec import structs

from coordinator.admission.decisions import Predicted
from coordinator.generation import GenerationRequest
from pdserve.protocol import Slo

_JUST_OVERDUE_S = -1e-9  # stands for exactly nothing left: 0 means that nothing was promised


def has_promise(slo: Slo) -> bool:
    """Return whether a TTFT or a TPOT is promised."""
    return bool(slo.ttft_s or slo.tpot_s)


def is_possible(slo: Slo, predicted: Predicted) -> bool:
    """Return whether there is a promise, and idle nodes could keep all of it."""
    keeps_ttft = not slo.ttft_s or slo.ttft_s > predicted.idle_ttft_s
    keeps_tpot = not slo.tpot_s or slo.tpot_s > predicted.idle_tpot_s
    return has_promise(slo) and keeps_ttft and keeps_tpot


def without_promise(slo: Slo, lowest_priority: int) -> Slo:
    """Return the Slo without its promise, at `lowest_priority` at most.

    An Slo without a promise is returned unchanged.
    """
    if not has_promise(slo):
        return slo
    priority = min(slo.priority, lowest_priority)
    return structs.replace(slo, ttft_s=0.0, tpot_s=0.0, hold_s=0.0, priority=priority)


def promise_left(request: GenerationRequest, deadline_s: float, elapsed_s: float) -> Slo:
    """Return what is left of a request's promise `elapsed_s` after its start.

    `deadline_s` also counts from the start; the promise counts from receipt.
    """
    slo, waited_s = request.slo, request.waited_s + elapsed_s
    return structs.replace(
        slo,
        ttft_s=_left_s(slo.ttft_s, waited_s),
        hold_s=_left_s(slo.hold_s, waited_s),
        deadline_s=_left_s(deadline_s, elapsed_s),
    )


def left_of(admitted: Slo, left: Slo) -> Slo:
    """Return `left` if a promise was admitted; else the admitted Slo, with the deadline left."""
    return left if has_promise(admitted) else structs.replace(admitted, deadline_s=left.deadline_s)


def _left_s(promised_s: float, elapsed_s: float) -> float:
    if promised_s == 0:
        return 0.0
    left_s = promised_s - elapsed_s
    return left_s if left_s != 0 else _JUST_OVERDUE_S
