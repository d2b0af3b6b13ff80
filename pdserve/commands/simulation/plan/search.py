"""Which deployment is the cheapest that serves a load, and what would change that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isclose

import msgspec

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.plan.cost import cost_of, price_per_hour
from pdserve.commands.simulation.plan.knee import Knee, knee_of
from pdserve.commands.simulation.predict.deployment import Deployment, Result, Rig, runs_of
from pdserve.commands.simulation.predict.goodput import pooled
from pdserve.commands.simulation.predict.load import Question
from pdserve.settings.config import Mode
from pdserve.shared.costs import Prices, TokenCosts
from pdserve.shared.errors import CalibrationError, ConfigError

_ENOUGH = 2  # deployments of a mode that serve the load: the cheapest, and one to compare it with
_MOST_OTHERS = 3  # deployments that are tried instead of the chosen one if something changes
_DEAR = 1.5  # of the cheapest that serves the load: what costs more is not tried any more
Variants = Callable[[Deployment], list[Deployment]]  # as Rig.variants
OFF = 0.2  # by how much the rate, lengths and step times may turn out different


class Tried(msgspec.Struct, frozen=True):
    """One deployment at the rate that is asked for."""

    deployment: Deployment
    attainment: float
    cost: TokenCosts
    result: Result  # of the first seed

    @property
    def tpot_ms(self) -> float:
        """Median TPOT of its requests, in ms; infinite if none has ended."""
        p50 = self.result.score.tpot_ms.p50
        return float("inf") if p50 is None else p50


class Change(msgspec.Struct, frozen=True):
    """What would be the cheapest deployment if one thing were different."""

    what: str  # "rate +20 %"
    attainment: float | None  # of the one that was chosen; None: it cannot be predicted
    deployment: Deployment | None  # None: none of those considered
    unknown: str = ""  # why it cannot be predicted


@dataclass(frozen=True, slots=True)
class Search:
    """Looks for the cheapest deployment that serves a rate."""

    rig: Rig
    question: Question
    promise: Promise
    prices: Prices
    num_seeds: int
    max_nodes: int
    unknown: dict[str, str] = field(default_factory=dict)  # deployment |-> why it was not predicted

    def tried(self, modes: Sequence[Mode], rate: float, knee: Knee) -> list[Tried]:
        """Try deployments, cheapest first, until a few of each mode serve the rate.

        Those that cost as much as the cheapest of their mode are all tried.

        Raises:
            CalibrationError: none of them is within the calibration.
        """
        found: list[Tried] = []
        error: CalibrationError | None = None
        for mode in modes:
            num_good = 0
            for deployment in candidates(mode, self.max_nodes, self.prices, self.rig.variants):
                if not knee.could_serve(deployment, rate):
                    continue
                price = price_per_hour(deployment, self.prices)
                cheapest = self.cheapest(found)
                if cheapest and price > _DEAR * cheapest[0].cost.per_hour:
                    break
                of_mode = self.cheapest([one for one in found if one.deployment.mode == mode])
                is_equal = bool(of_mode) and isclose(price, of_mode[0].cost.per_hour)
                if num_good >= _ENOUGH and not is_equal:
                    break
                try:
                    tried = self.at(deployment, rate)
                except CalibrationError as outside:
                    self.unknown[deployment.text] = outside.message
                    error = error or outside
                    continue
                found.append(tried)
                num_good += self.serves(tried)
        if error is not None and not found:
            raise error
        return found

    def at(self, deployment: Deployment, rate: float, longer: float = 1.0) -> Tried:
        """Try one deployment at a rate."""
        runs = runs_of(
            self.rig, deployment, self.question, rate, self.promise, self.num_seeds, longer
        )
        cost = cost_of(deployment, runs[0], self.prices)
        return Tried(deployment, pooled(runs).attainment, cost, runs[0])

    def serves(self, tried: Tried) -> bool:
        """Whether enough requests of each kind are in time."""
        return tried.attainment >= self.rig.target

    def cheapest(self, tried: Sequence[Tried]) -> list[Tried]:
        """Return the cheapest that serve, all of one price."""
        good = [one for one in tried if self.serves(one)]
        least = min((one.cost.per_hour for one in good), default=0.0)
        return [one for one in good if isclose(one.cost.per_hour, least)]

    def changes(self, chosen: Deployment, rate: float) -> Iterator[Change]:
        """Yield what a different rate, different lengths and step times would change."""
        for sign in (1, -1):
            factor, text = 1 + sign * OFF, f"{sign * OFF:+.0%}"
            slower = replace(self, rig=replace(self.rig, slower=factor))
            yield self._change(f"rate {text}", chosen, rate * factor, 1.0)
            yield self._change(f"lengths {text}", chosen, rate, factor)
            yield slower._change(f"step times {text}", chosen, rate, 1.0)

    def _change(self, what: str, chosen: Deployment, rate: float, longer: float) -> Change:
        try:
            return self._changed(what, chosen, rate, longer)
        except (CalibrationError, ConfigError) as error:  # longer than the model, or ever measured
            return Change(what, None, None, error.message)

    def _changed(self, what: str, chosen: Deployment, rate: float, longer: float) -> Change:
        """Look at the chosen deployment, then at its mode's others: cheaper, or dearer, ones."""
        now = self.at(chosen, rate, longer)
        price = price_per_hour(chosen, self.prices)
        case = self.question.case(self.rig.calibration, 0, longer)
        knee = knee_of(self.rig, case, self.promise, self.question.count)
        best = now.deployment if self.serves(now) else None
        others = [
            other
            for other in candidates(chosen.mode, self.max_nodes, self.prices, self.rig.variants)
            if (price_per_hour(other, self.prices) < price) is (best is not None)
            and other != chosen
            and knee.could_serve(other, rate)
        ]
        # Of cheaper ones the dearest few: they are the likeliest to serve it.
        few = others[-_MOST_OTHERS:] if best is not None else others[:_MOST_OTHERS]
        good = (other for other in few if self.serves(self.at(other, rate, longer)))
        return Change(what, now.attainment, next(good, best))


def candidates(
    mode: Mode, max_nodes: int, prices: Prices, variants: Variants = lambda one: [one]
) -> list[Deployment]:
    """Return the deployments of a mode, cheapest first, with all weights that there are."""
    if mode == "colocated":
        return [Deployment(mode, 0, count) for count in range(1, max_nodes + 1)]
    pairs = [
        variant
        for prefill in range(1, max_nodes)
        for decode in range(1, max_nodes + 1 - prefill)
        for variant in variants(Deployment(mode, prefill, decode))
    ]
    return sorted(pairs, key=lambda pair: price_per_hour(pair, prices))


def front(tried: Sequence[Tried]) -> list[Tried]:
    """Return those to which no other is both as cheap and as fast: dearer ones are faster."""
    kept: list[Tried] = []
    for one in sorted(tried, key=lambda one: (one.cost.per_hour, one.tpot_ms)):
        if not kept or one.tpot_ms < kept[-1].tpot_ms:
            kept.append(one)
    return kept
