"""What is left of a request's promise while time passes."""

from __future__ import annotations

from msgspec import structs

from coordinator.admission.promises import has_promise
from coordinator.generation import GenerationRequest
from pdserve.protocol import Slo

_JUST_OVERDUE_S = -1e-9  # stands for exactly nothing left: 0 means that nothing was promised


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
