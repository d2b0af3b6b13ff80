"""Whether intervals of a goodput cover it: on a queue whose goodput is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pdserve.commands.bench.compare.goodput import RatePoint, drawn, goodput
from pdserve.commands.bench.compare.shown.verdict import dispersion, verdicts

TARGET, TIMES = 0.9, 120
RATES = (0.6, 0.75, 0.9, 0.97, 1.04, 1.2)
CHATS, LONG = 192, 16  # requests of a run; a long one is eight times the work
LOAD = 0.85  # of the server at rate 1, which is made to be the goodput


def sojourns(rate: float, rng: np.random.Generator) -> tuple[npt.NDArray[np.float64], ...]:
    """Return the times that chats and long prompts spend at one server, first come first served."""
    count = CHATS + LONG
    arrivals = np.sort(rng.uniform(0, count / rate, count))
    is_long = rng.permutation(count) < LONG
    work = np.where(is_long, 8.0, 1.0) * rng.lognormal(-0.045, 0.3, count)
    work *= LOAD * count / (CHATS + 8 * LONG)
    behind = np.concatenate([[0.0], np.cumsum(work[:-1] - np.diff(arrivals))])
    spent = behind - np.minimum.accumulate(behind) + work
    return spent[~is_long], spent[is_long]


@pytest.mark.long
def test_intervals_cover_the_goodput_where_two_kinds_cross_at_the_same_rate() -> None:
    """In at least 85 of 100 comparisons those of 90 %, and they are of use."""
    rng = np.random.default_rng(0)
    at_goodput = [sojourns(1.0, rng) for _ in range(1500)]
    promised = [np.quantile(np.concatenate(of), TARGET) for of in zip(*at_goodput, strict=True)]

    def run(rate: float) -> RatePoint:
        chats, long = (
            (int((spent <= most).sum()), len(spent))
            for spent, most in zip(sojourns(rate, rng), promised, strict=True)
        )
        return RatePoint(rate, {"chat": chats, "long": long})

    covers: list[bool] = []
    widths: list[float] = []
    num_differing = 0
    for seed in range(TIMES):
        first, again = ([run(rate) for rate in RATES * 3] for _ in "AA")
        spread = dispersion([[*first, *again]])
        found = goodput([*first, *again], TARGET, seed, spread)
        covers.append(found.low <= 1 and (found.high is None or found.high >= 1))
        if found.low and found.high:
            widths.append(found.high / found.low)
        draws = {"a": drawn(first, TARGET, 0, spread), "b": drawn(again, TARGET, 1, spread)}
        (verdict,) = verdicts(draws, None, dict.fromkeys(draws, RATES))
        num_differing += verdict.is_certain
    assert np.mean(covers) >= 0.85
    assert len(widths) > 0.9 * TIMES
    assert np.median(widths) < 1.3
    assert num_differing <= TIMES / 20
