"""Holding token 1 back: short prompts that leave a prefill node in a burst keep their TPOT."""

from __future__ import annotations

import pytest

from pdserve.protocol import Slo
from pdserve.settings.config import PolicyConfig
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson

UNTIL_S = 60.0


def served(hold_s: float, rate: float = 6, tpot_s: float = 0.035, long: int = 8000) -> Score:
    """Serve `rate` chats per second and, now and then, a long prompt that delays later ones."""
    slo = Slo(name="a", ttft_s=6.0, tpot_s=tpot_s, hold_s=hold_s)
    chats = calls(
        "chat", poisson(rate, UNTIL_S, seed=1), fixed(128), lognormal(200, 0.3, most=512), slo
    )
    longs = calls("long", poisson(0.3, UNTIL_S, seed=2), fixed(long), fixed(64), slo)
    return fleet(1, 1, "disaggregated", merged(chats, longs), PolicyConfig()).score


@pytest.mark.long
def test_held_back_while_decode_nodes_are_full_more_promises_are_kept():
    at_once, held = served(0.0), served(5.4)
    assert at_once.tpot_attainment < 0.85
    assert held.tpot_attainment > at_once.tpot_attainment + 0.08
    assert held.ttft_attainment == at_once.ttft_attainment == 1.0


def test_the_first_that_finds_no_place_keeps_its_promise_too():
    """A policy that held back only after others had waited would have lost these already."""
    at_once, held = served(0.0, rate=2, tpot_s=0.030), served(5.4, rate=2, tpot_s=0.030)
    assert at_once.tpot_attainment < 0.87
    assert held.tpot_attainment > at_once.tpot_attainment + 0.08
    assert held.ttft_attainment == at_once.ttft_attainment == 1.0
