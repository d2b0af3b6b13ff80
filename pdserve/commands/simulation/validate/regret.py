"""What following a prediction costs: the deployment that it calls the best, beside the best one.

A case is a load with its promises, under which all deployments were measured. Of a goodput beyond
the rates that were measured only a bound is known, so what depends on more than it is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf

import msgspec
import numpy as np
from rich.table import Table

from pdserve.commands.bench.compare.goodput import Draws, crossing, drawn
from pdserve.commands.bench.compare.shown.verdict import dispersion
from pdserve.commands.simulation.validate.row import Row

CLOSE = 0.03  # regret up to which a choice is as good as the best one


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Goodputs are in requests per second, and measured if nothing else is said."""

    load: str
    ttft_s: float
    tpot_s: float
    chosen: str  # the deployment with the highest predicted goodput
    best: str  # that with the highest measured one
    predicted: float  # goodput of the chosen one
    goodput: float  # of the chosen one; the highest rate if above the rates, 0 if below
    best_goodput: float
    regret: float | None  # share of the best goodput that is lost; None: not all was measured
    certainty: float  # that at most `CLOSE` is lost, for all that chance allows
    unknown: float  # share of what chance allows of which the rates do not tell whether it is so

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
    found = [crossing(row.points, target) for row in rows]
    chosen = max(range(len(rows)), key=lambda i: rows[i].predicted_goodput)
    best = max(range(len(rows)), key=lambda i: found[i][0])
    measured = [np.array([inf if where == "above the rates" else rate]) for rate, where in found]
    ((least,), (most,)) = _lost(rows, measured, chosen)
    # Each rate was measured once, so it is simulated runs that tell how late requests cluster.
    spread = dispersion([row.simulated for row in rows])
    draws = [drawn(row.points, target, seed, spread) for seed, row in enumerate(rows)]
    at_least, at_most = _lost(rows, draws, chosen)
    return Regret(
        load=rows[0].load,
        ttft_s=rows[0].ttft_s,
        tpot_s=rows[0].tpot_s,
        chosen=rows[chosen].deployment,
        best=rows[best].deployment,
        predicted=rows[chosen].predicted_goodput,
        goodput=found[chosen][0],
        best_goodput=found[best][0],
        regret=float(least) if least == most else None,
        certainty=float((at_most <= CLOSE).mean()),
        unknown=float(((at_least <= CLOSE) & (at_most > CLOSE)).mean()),
    )


def _lost(rows: Sequence[Row], goodputs: Sequence[Draws], chosen: int) -> tuple[Draws, Draws]:
    """Return the least and the most of the best goodput that the chosen one may lose, as shares.

    `goodputs` are as `drawn` has them: 0 is at most the lowest rate, infinite at least the highest.
    """
    least = [np.where(of == inf, row.rates[-1], of) for row, of in zip(rows, goodputs, strict=True)]
    most = [np.where(of == 0, row.rates[0], of) for row, of in zip(rows, goodputs, strict=True)]
    own_least, own_most = least.pop(chosen), most.pop(chosen)
    best_least, best_most = np.max(least, axis=0), np.max(most, axis=0)
    return 1 - _kept(own_most, best_least), 1 - _kept(own_least, best_most)


def _kept(own: Draws, best: Draws) -> Draws:
    """Return the share of the best of the others that the chosen one has; 1 if it is better."""
    return np.divide(own, best, out=np.ones_like(own), where=own < best)


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
            _share(regret.certainty, regret.certainty + regret.unknown),
        )
    return made


def _share(least: float, most: float) -> str:
    said = f"{least:.0%}", f"{most:.0%}"
    return said[0] if said[0] == said[1] else f"{said[0]}-{said[1]}"
