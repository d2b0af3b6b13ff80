"""A ramp of requests, and the nodes that follow it: what it costs, and which promises break."""

from __future__ import annotations

from bisect import bisect_left
from random import Random

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Slo
from tests.simulation.machines import A100_13B
from tests.simulation.scaled import scaled
from tests.simulation.workload import calls, lognormal

PROMISE = Slo(name="chat", ttft_s=2.5, tpot_s=0.06, hold_s=2.0)
# Minutes and requests/s: lines between these points.
RAMP = [(0, 2.0), (15, 2.0), (25, 10.0), (40, 10.0), (45, 1.0), (60, 1.0)]
LEAST, MOST = (1, 2), 8  # nodes: of each pool at first, and of both together


def rate_at(minute: float) -> float:
    """The rate on the line through these points."""
    index = max(1, bisect_left(RAMP, (minute, 0.0)))
    (from_min, before), (to_min, after) = RAMP[index - 1], RAMP[index]
    return before + (minute - from_min) / (to_min - from_min) * (after - before)


def ramp(seed: int) -> list[Call]:
    """Prompts of about 1,800 tokens and answers of about 150."""
    random, highest = Random(seed), max(rate for _, rate in RAMP)
    now_s, times = random.expovariate(highest), []
    while now_s < RAMP[-1][0] * 60:
        if random.random() < rate_at(now_s / 60) / highest:
            times.append(now_s)
        now_s += random.expovariate(highest)
    prompt, output = lognormal(1600, 0.5, 8000), lognormal(120, 0.6, 1000)
    return calls(f"ramp {seed}", times, prompt, output, PROMISE)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_ramp_is_followed_for_less_than_three_quarters_of_all_node_hours() -> None:
    score, front = scaled(ramp(1), A100_13B, LEAST, MOST, foresees=True)
    assert score.attainment >= 0.97, f"{score.attainment:.4f}, {front.node_s / 3600:.2f} h"
    assert front.node_s / 3600 <= 5.9
