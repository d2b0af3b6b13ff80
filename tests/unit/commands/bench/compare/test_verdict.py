"""What a comparison says of two servers: from made-up servers whose goodput is known."""

from __future__ import annotations

from math import exp, inf

import numpy as np
import pytest

from pdserve.commands.bench.compare.goodput import RESAMPLES, RatePoint, drawn
from pdserve.commands.bench.compare.shown.verdict import (
    Noise,
    Ratio,
    Verdict,
    dispersion,
    undecided,
    verdicts,
)
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.deployment import Deployment, Rig, run
from pdserve.commands.simulation.predict.load import Question, Ranged
from pdserve.settings.config import PolicyConfig
from tests.matrix import matrix

TARGET = 0.9
RATES = {name: [1.0, 8.0] for name in ("a", "b", "colocated", "disaggregated")}


def share(rate: float, goodput: float) -> float:
    """Of requests in time: the target at `goodput`, falling within about a fifth of it."""
    return 1 / (1 + exp((rate / goodput - 1) * 12) / 9)


def runs(
    goodput: float, rng: np.random.Generator, *, num: int = 300, spread: float = 0.0
) -> list[RatePoint]:
    """Two runs at each rate around it; `spread`: of the machine's speed from run to run."""
    points = []
    for rate in (4.0, 5.0, 6.0, 7.0, 8.0) * 2:
        speed = goodput * exp(rng.normal(0, spread))
        points.append(RatePoint(rate, {"": (int(rng.binomial(num, share(rate, speed))), num)}))
    return points


def verdict_of(first: list[RatePoint], second: list[RatePoint]) -> Verdict:
    phi = dispersion([first, second])
    draws = {"a": drawn(first, TARGET, 0, phi), "b": drawn(second, TARGET, 1, phi)}
    (found,) = verdicts(draws, None, RATES)
    return found


@pytest.mark.parametrize("spread", matrix([0.0, 0.05], 1))
def test_a_server_does_not_differ_from_itself(spread: float) -> None:
    """In at least 19 of 20 comparisons, also where the machine's speed varies."""
    rng = np.random.default_rng(5)
    certain = [
        verdict_of(runs(6, rng, spread=spread), runs(6, rng, spread=spread)).is_certain
        for _ in range(60)
    ]
    assert sum(certain) <= 3


def recorded(rates: tuple[float, ...], num_runs: int) -> dict[float, list[RatePoint]]:
    """Return the runs of one cluster at each rate: simulated, so late requests come together."""
    calibration = load_calibration("a100-13b")
    rig = Rig(
        calibration=calibration,
        policy=PolicyConfig(),
        ranges=Ranged(calibration, extrapolates=True),
        one_host=False,
        admission=False,
        target=1e-9,  # no run is stopped early
    )
    question = Question("", "conversation", 0.0, 100)
    promise, cluster = Promise(0.6, 0.04), Deployment("disaggregated", 1, 1)
    return {
        rate: [
            run(rig, cluster, question.case(calibration, seed), rate, 100, promise, seed).point
            for seed in range(num_runs)
        ]
        for rate in rates
    }


@pytest.mark.long  # one that is made up does not by default
def test_a_cluster_does_not_differ_from_itself_on_recorded_runs() -> None:
    """In at least 19 of 20 comparisons of two runs at each rate with two others."""
    pool, rng = recorded((20.0, 26.0, 34.0), 10), np.random.default_rng(2)
    assert any(max(dispersion([runs]).values()) > 2 for runs in pool.values()), (
        "requests are independent"
    )
    found = 0
    for _ in range(40):
        first: list[RatePoint] = []
        second: list[RatePoint] = []
        for points in pool.values():
            a, b, c, d = rng.permutation(len(points))[:4].tolist()
            first += [points[a], points[b]]
            second += [points[c], points[d]]
        found += verdict_of(first, second).is_certain
    assert found <= 2


def test_a_server_that_is_a_third_better_is_found() -> None:
    rng = np.random.default_rng(6)
    found = [verdict_of(runs(6.4, rng), runs(4.9, rng)) for _ in range(20)]
    assert all(one.is_certain and one.server == "a" for one in found)
    ratios = [one.ratio for one in found if one.ratio is not None]
    assert np.mean([r.low <= 6.4 / 4.9 <= r.high for r in ratios]) >= 0.85
    assert all(r.high / r.low < 1.3 for r in ratios)


def test_words_for_the_two_modes() -> None:
    draws = {"colocated": np.full(2000, 3.0), "disaggregated": np.linspace(2.0, 2.6, 2000)}
    (found,) = verdicts(draws, None, RATES)
    assert found.text.startswith("do not disaggregate this: colocated keeps 1.30x, 95 % interval 1")
    draws = {"colocated": np.linspace(2.0, 2.6, 2000), "disaggregated": np.full(2000, 3.0)}
    assert verdicts(draws, None, RATES)[0].text.startswith("disaggregate this: ")


def test_a_machine_that_differs_from_itself_is_not_believed() -> None:
    draws = {"a": np.full(2000, 1.2), "b": np.full(2000, 1.0)}
    assert verdicts(draws, None, RATES)[0].is_certain
    noise = Noise("a", Ratio(0.75, 0.7, 0.8), 1.0)
    assert "no smaller difference is believed" in noise.text
    (found,) = verdicts(draws, noise, RATES)
    assert not found.is_certain
    assert "cannot tell a from b" in found.text


def test_it_says_what_a_longer_run_would_tell() -> None:
    rng = np.random.default_rng(1)
    draws = {name: np.exp(rng.normal(0, 0.15, 2000)) for name in "ab"}
    (found,) = verdicts(draws, None, RATES)
    assert not found.is_certain
    # Half an interval is 1.96 x 0.15 x sqrt(2) = 0.42; a tenth is 0.095.
    assert "about 19 times" in found.text or "about 20 times" in found.text


def test_who_keeps_nothing_is_told() -> None:
    nothing = np.zeros(2000)
    (found,) = verdicts({"a": np.ones(2000), "b": nothing}, None, RATES)
    assert (found.is_certain, found.ratio) == (True, None)
    assert found.text == "a keeps the promise; b at no rate that was measured"
    (found,) = verdicts({"a": nothing, "b": nothing}, None, RATES)
    assert not found.is_certain


def test_two_beside_the_lowest_rate_are_not_told_apart_by_a_hair() -> None:
    """Of one, half of the draws keep the promise nowhere; of the other, nearly half."""
    points = {
        name: [RatePoint(1.0, {"": (met, 100)}), RatePoint(2.0, {"": (10, 100)})]
        for name, met in (("a", 92), ("b", 88))
    }
    draws = {name: drawn(runs, TARGET, 0) for name, runs in points.items()}
    (found,) = verdicts(draws, None, RATES)
    assert (found.server, found.is_certain, found.ratio) == ("a", False, None)
    assert found.text.startswith("it seems that a keeps the promise; b at no rate")
    assert found.text.endswith("but this run cannot tell")


def test_whoever_keeps_the_promise_everywhere_has_no_goodput_to_compare() -> None:
    above, crossing = np.full(2000, np.inf), np.linspace(3.0, 5.0, 2000)
    assert Ratio.of(above, above) is None
    (found,) = verdicts({"a": above, "b": above}, None, RATES)
    assert not found.is_certain
    assert found.text.startswith("this run cannot tell a from b: both keep the promise at all")
    (found,) = verdicts({"a": above, "b": crossing}, None, RATES)
    assert found.is_certain
    assert found.text.endswith("unlike b, so a keeps more than 1.6x (97.5 %)")
    (found,) = verdicts({"a": above, "b": crossing}, Noise("a", Ratio(0.5, 0.4, 0.6), 1), RATES)
    assert not found.is_certain, "a machine that differs from itself by more is not believed"


def test_how_much_more_the_best_one_keeps_than_one_that_keeps_nothing() -> None:
    draws = {"a": np.linspace(2.0, 4.0, 2001), "b": np.zeros(2001)}
    (found,) = verdicts(draws, None, {"a": [2.0, 5.0], "b": [0.5]})
    assert found.text.endswith("b at no rate that was measured, so a keeps more than 4.1x (97.5 %)")


def test_runs_that_vary_more_than_independent_requests_count_for_less() -> None:
    def equal(*groups: list[tuple[int, int]]) -> list[list[RatePoint]]:
        return [[RatePoint(i, {"": run}) for run in group] for i, group in enumerate(groups)]

    calm = equal(*[[(50, 100), (52, 100)], [(90, 100), (88, 100)]] * 50)
    assert dispersion(calm)[""] == pytest.approx(1.0, abs=0.06)
    wild = equal(*[[(30, 100), (70, 100)]] * 100)
    assert dispersion(wild)[""] == pytest.approx(32.0, rel=0.06)  # 2 x 20^2 / 25
    assert dispersion(wild[:1])[""] > 100  # one pair tells little
    assert dispersion(equal([(100, 100), (100, 100)], [(7, 9)])) == {"": 1.0}  # nothing to see
    points = [RatePoint(1, {"": (99, 100)}), RatePoint(2, {"": (70, 100)})]
    wide, narrow = (
        np.ptp(np.percentile(drawn(points, TARGET, 0, {"": phi}), (10, 90))) for phi in (8.0, 1.0)
    )
    assert wide > 1.3 * narrow


@pytest.mark.parametrize(
    ("others", "spread", "still_open"),
    [
        ({"b": 4.0, "c": 3.0}, 0.02, set()),  # both are worse
        ({"b": 5.98, "c": 3.0}, 0.005, set()),  # as good, but for less than a twentieth
        ({"b": 5.9, "c": 3.0}, 0.05, {"a", "b"}),
        ({"b": inf, "c": 3.0}, 0.02, set()),  # above all rates: both are worse, whatever it is
    ],
)
def test_what_is_decided_needs_no_further_runs(
    others: dict[str, float], spread: float, still_open: set[str]
) -> None:
    rng = np.random.default_rng(1)
    draws = {
        name: at * np.exp(spread * rng.standard_normal(RESAMPLES))
        for name, at in {"a": 6.0, **others}.items()
    }
    assert undecided(draws, None) == still_open


def test_who_may_be_above_the_rates_as_well_is_still_open() -> None:
    best, maybe = np.full(RESAMPLES, inf), np.full(RESAMPLES, 6.0)
    maybe[: RESAMPLES // 50] = inf
    assert undecided({"a": best, "b": maybe}, None) == {"a", "b"}


def test_nobody_is_done_with_by_less_than_what_a_server_differs_from_itself() -> None:
    rng = np.random.default_rng(1)
    goodputs = {"a": 6.0, "b": 5.0}
    draws = {n: at * np.exp(0.01 * rng.standard_normal(RESAMPLES)) for n, at in goodputs.items()}
    assert undecided(draws, None) == set()
    assert undecided(draws, Noise("a", Ratio(1.3, 1.2, 1.4))) == {"a", "b"}
