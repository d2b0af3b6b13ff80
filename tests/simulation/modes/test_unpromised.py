"""Out of the box nothing is promised, so nobody is refused, and no mode wastes the machines."""

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from pdserve.commands.simulation.machine import scaled
from pdserve.protocol import Slo
from pdserve.settings.config import Mode, PolicyConfig
from pdserve.shared.slo import DEFAULT_CLASS, DEFAULT_CLASSES, parse_slo_classes
from tests.matrix import matrix
from tests.simulation.compare_modes import BUS, COMPARED, MIXTURES, NODES
from tests.simulation.machines import ONE_CORE_53M
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score
from tests.simulation.workload import calls, fixed

USUAL = parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS).default
SLO = Slo(
    name=USUAL.name,
    priority=USUAL.priority,
    ttft_s=USUAL.ttft_s,
    tpot_s=USUAL.tpot_s,
    hold_s=USUAL.hold_s,
)
DEFAULT_TPOT_S = PolicyConfig().default_tpot_s


@cache
def burst(mode: Mode, slower: float) -> Score:
    """Sixty-four requests at once: four times what a closed loop of sixteen has in flight."""
    machine = replace(ONE_CORE_53M, costs=scaled(ONE_CORE_53M.costs, slower))
    load = calls("b", [0.0] * 64, fixed(512), fixed(64), SLO, most_output=64)
    return fleet(*NODES[mode], mode, load, PolicyConfig(), machine, admission=True).score


@pytest.mark.parametrize("slower", matrix([1.0, 8.0], 1))
@pytest.mark.parametrize("mode", matrix(NODES, 2))
def test_nobody_is_refused_that_could_be_served(mode: Mode, slower: float) -> None:
    score = burst(mode, slower)
    assert score.num_refused == 0
    assert len(score.served) == 64


@pytest.mark.parametrize("mode", matrix(NODES, {"adaptive"}))
def test_batches_still_keep_a_usable_pace(mode: Mode) -> None:
    """On a machine where sixty-four streams at once would take 0.5 s a token."""
    crowd = ONE_CORE_53M.perf(16.0).decode_s(64, 64 * 544)
    assert crowd > 1.9 * DEFAULT_TPOT_S
    score = burst(mode, 16.0)
    assert len(score.served) == 64
    if mode != "disaggregated":  # there the wait for a place is between tokens 1 and 2
        assert score.mean_tpot_s < 1.1 * DEFAULT_TPOT_S


@pytest.mark.long
def test_adaptive_mode_is_as_good_as_the_better_one_without_promises() -> None:
    """By the whole time of a request: neither TTFT nor TPOT alone is what anybody asked for."""
    load = [replace(call, slo=SLO) for call in MIXTURES["12 chats to 1 long"].load(2.4, seed=0)]
    e2e_s: dict[Mode, float] = {}
    for mode in COMPARED:
        run = fleet(
            *NODES[mode], mode, load, PolicyConfig(), ONE_CORE_53M, sharing=BUS, admission=True
        )
        assert len(run.score.served) == len(load)
        e2e_s[mode] = fmean(o.token_times_s[-1] - o.call.at_s for o in run.score.served)
    assert e2e_s.pop("adaptive") < 1.15 * min(e2e_s.values())
