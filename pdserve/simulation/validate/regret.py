"""What following a prediction costs: the deployment that it calls the best, beside the best one.

A case is a load with its promises, under which all deployments were measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

from pdserve.simulation.validate.row import Row

CLOSE = 0.03  # regret up to which a choice is as good as the best one


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Goodputs are in requests per second, and measured if nothing else is said."""

    load: str
    ttft_s: float
    tpot_s: float
    chosen: str  # the deployment with the highest predicted goodput
    best: str  # that with the highest measured one
    predicted: float  # goodput of the chosen one
    goodput: float  # of the chosen one; "above the rates": the highest rate
    best_goodput: float
    regret: float | None  # share of the best goodput that is lost; None: not all was measured
    certainty: float  # that at most `CLOSE` is lost, for all that chance allows

    @property
    def is_close(self) -> bool:
        """Whether the choice was as good as the best."""
        return self.regret is not None and self.regret <= CLOSE


def regrets_of(rows: Iterable[Row], target: float) -> list[Regret]:
    """Return the regret of each case that had a choice."""
    cases: dict[tuple[str, float, float], list[Row]] = defaultdict(list)
    for row in rows:
        cases[row.load, row.ttft_s, row.tpot_s].append(row)
    return [_regret(of_case, target) for of_case in cases.values() if len(of_case) > 1]


def _regret(rows: Sequence[Row], target: float) -> Regret:
    found = [row.goodput(target) for row in rows]
    chosen = max(range(len(rows)), key=lambda i: rows[i].predicted_goodput)
    best = max(range(len(rows)), key=lambda i: found[i].rate)
    # What lies above the rates may be any goodput, so only the chosen one may.
    is_known = all(
        goodput.where != "above the rates" or index == chosen == best
        for index, goodput in enumerate(found)
    )
    is_known = is_known and found[best].rate > 0
    draws = [row.drawn(target) for row in rows]
    most = draws[best]
    for of_row in draws:
        most = most.clip(min=of_row)
    return Regret(
        load=rows[0].load,
        ttft_s=rows[0].ttft_s,
        tpot_s=rows[0].tpot_s,
        chosen=rows[chosen].deployment,
        best=rows[best].deployment,
        predicted=rows[chosen].predicted_goodput,
        goodput=found[chosen].rate,
        best_goodput=found[best].rate,
        regret=1 - found[chosen].rate / found[best].rate if is_known else None,
        certainty=float((draws[chosen] >= (1 - CLOSE) * most).mean()),
    )


def said(regrets: Sequence[Regret]) -> list[str]:
    """For people: in how many cases the choice was as good as the best."""
    if not regrets:
        return []
    num_close = sum(regret.is_close for regret in regrets)
    known = sorted(regret.regret for regret in regrets if regret.regret is not None)
    worst = f", at worst {known[-1]:.1%}" if known else ""
    return [
        f"the deployment with the highest predicted goodput is within {CLOSE:.0%} of the best "
        f"measured one in {num_close} of {len(regrets)} cases ({len(regrets) - len(known)} of them "
        f"were not measured to the end){worst}"
    ]


def regret_table(regrets: Sequence[Regret]) -> Table:
    """For people: a line for each case."""
    made = Table(title="what following the prediction costs: goodputs")
    for column in ("load", "TTFT s", "TPOT ms", "chosen", "predicted", "measured", "the best",
                   "measured", "regret", f"P(<= {CLOSE:.0%})"):  # fmt: skip
        is_text = column in ("load", "chosen", "the best")
        made.add_column(column, justify="left" if is_text else "right")
    for regret in regrets:
        made.add_row(
            regret.load,
            f"{regret.ttft_s:.3g}",
            f"{1e3 * regret.tpot_s:.3g}",
            regret.chosen,
            f"{regret.predicted:.2f}",
            f"{regret.goodput:.2f}",
            regret.best,
            f"{regret.best_goodput:.2f}",
            "?" if regret.regret is None else f"{regret.regret:.1%}",
            f"{regret.certainty:.0%}",
        )
    return made
