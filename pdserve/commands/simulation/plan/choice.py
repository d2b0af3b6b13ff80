"""Which of the deployments that serve a load is taken, and in one sentence why."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from pdserve.commands.simulation.plan.report import Best


def choose(cheapest: Sequence[Best]) -> tuple[Best | None, str]:
    """Return the best of each mode's cheapest deployments, and why it is the best.

    The least cost decides; of equal cost the highest goodput; of equal goodput, or where it is not
    known, the share of requests in time.
    """
    if not cheapest:
        return None, ""
    least = min(best.tried.cost.per_hour for best in cheapest)
    equal = [best for best in cheapest if isclose(best.tried.cost.per_hour, least)]
    chosen = max(equal, key=_keeps)
    others = [best for best in equal if best is not chosen]
    if not others:
        dearer = sorted((best for best in cheapest if best is not chosen), key=_price)
        told = f"; next is {dearer[0].tried.deployment.text}" if dearer else ""
        return chosen, f"nothing cheaper serves the load{told}"
    second = max(others, key=_keeps)
    names = f"{len(equal)} deployments cost {least:.4g} an hour"
    return chosen, f"{names}; {_difference(chosen, second)}"


def _keeps(best: Best) -> tuple[float, float]:
    """How much it keeps its promises, to compare: as closely as it is told."""
    goodput = float(f"{best.goodput.rate:.3g}") if best.goodput else 0.0
    return goodput, best.tried.attainment


def _price(best: Best) -> float:
    return best.tried.cost.per_hour


def _difference(one: Best, other: Best) -> str:
    name = other.tried.deployment.text
    if one.goodput and other.goodput and _keeps(one)[0] > _keeps(other)[0]:
        goodputs = f"{one.goodput.text}/s against {other.goodput.text}"
        return f"its goodput is the highest, {goodputs} of {name}"
    if one.goodput and not other.goodput:
        return f"its goodput is {one.goodput.text}/s, and that of {name} is unknown"
    if one.tried.attainment > other.tried.attainment:
        shares = f"{one.tried.attainment:.1%} against {other.tried.attainment:.1%}"
        return f"of equal goodput, most of its requests are in time, {shares} of {name}"
    return f"{name} is as good"
