"""Whether an Slo promises anything, and whether the promise can be kept at all."""

from __future__ import annotations

import msgspec

from coordinator.admission.decisions import Predicted
from pdserve.protocol import Slo


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
    return msgspec.structs.replace(slo, ttft_s=0.0, tpot_s=0.0, hold_s=0.0, priority=priority)
