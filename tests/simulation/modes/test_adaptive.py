"""Adaptive mode against the two modes that it chooses between, on the same machines."""

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.host import Sharing
from pdserve.commands.simulation.machine import Machine
from pdserve.protocol import Slo
from pdserve.settings.config import Mode, PolicyConfig
from tests.matrix import matrix
from tests.simulation.machines import A100_13B, ONE_CORE_25M
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson

POLICY = PolicyConfig(prefill_policy="edf-slack", decode_policy="tpot-cap")
SMALL_BATCHES = replace(A100_13B, max_batch_size=64)


def documents(per_s: float, seed: int = 1) -> list[Call]:
    """Long prompts and a tight TPOT."""
    slo = Slo(name="documents", ttft_s=4.0, tpot_s=0.05)
    times = poisson(per_s, 40, seed=seed)
    return calls("r", times, lognormal(3000, 0.6, 12000), lognormal(100, 0.5, 400), slo)


def chats(per_s: float) -> list[Call]:
    """Short prompts, longer answers and a loose TPOT."""
    slo = Slo(name="chat", ttft_s=1.0, tpot_s=0.2)
    times = poisson(per_s, 20, seed=1)
    return calls("s", times, lognormal(200, 0.6, 1000), lognormal(150, 0.5, 500), slo)


def served(
    load: list[Call],
    num_nodes: int,
    mode: Mode,
    machine: Machine = A100_13B,
    sharing: Sharing | None = None,
) -> Score:
    num_prefill = 0 if mode == "colocated" else num_nodes // 2
    num_decode = num_nodes - num_prefill
    return fleet(num_prefill, num_decode, mode, load, POLICY, machine, sharing=sharing).score


@cache
def with_documents(per_s: float, mode: Mode) -> float:
    """Goodput over two arrival processes."""
    return fmean(served(documents(per_s, seed), 4, mode).goodput for seed in (12, 13))


@cache
def with_chats(per_s: float, mode: Mode) -> Score:
    return served(chats(per_s), 2, mode, SMALL_BATCHES)


@pytest.mark.long
@pytest.mark.parametrize(("per_s", "share"), matrix([(2.5, 0.95), (3.0, 0.9)], 1))
def test_long_prompts_and_a_tight_tpot_are_for_two_pools(per_s: float, share: float):
    """Near saturation, whole requests on prefill nodes cost pairs some of their prefill speed."""
    apart, together = (with_documents(per_s, mode) for mode in ("disaggregated", "colocated"))
    assert apart > together
    assert with_documents(per_s, "adaptive") > share * apart


@pytest.mark.long
@pytest.mark.parametrize("per_s", matrix([12.0, 16.0], 1))
def test_short_prompts_and_a_loose_tpot_are_for_one_pool(per_s: float):
    """Streams have twice the machines, and so run faster; TPOT shows it before attainment does."""
    apart, together = (with_chats(per_s, mode) for mode in ("disaggregated", "colocated"))
    assert together.mean_tpot_s < 0.8 * apart.mean_tpot_s
    assert together.goodput >= apart.goodput
    assert with_chats(per_s, "adaptive").goodput > 0.95 * together.goodput


@pytest.mark.long
def test_adaptive_borrows_decode_nodes_when_there_are_too_few_for_prompts():
    """One node of four prefills, which is too few."""
    load = documents(2.5)
    apart = fleet(1, 3, "disaggregated", load, POLICY).score
    adaptive = fleet(1, 3, "adaptive", load, POLICY).score
    assert apart.attainment < 0.9
    assert adaptive.attainment > 0.95


def _is_long(call: Call) -> bool:
    return call.prompt.num_tokens > 1000


def chats_between_long(
    chats_per_s: float, long_per_s: float, slo: Slo, seeds: tuple[int, int] = (1, 2)
) -> list[Call]:
    chat = lognormal(96, 0.4, 256), lognormal(256, 0.3, 512)
    chat_times, long_times = (
        poisson(per_s, 20, seed=seed)
        for per_s, seed in zip((chats_per_s, long_per_s), seeds, strict=True)
    )
    return merged(
        calls("chat", chat_times, *chat, slo, most_output=1),
        calls("long", long_times, fixed(4096), fixed(16), slo, most_output=1),
    )


def worst_of_two_kinds(
    chats_per_s: float,
    long_per_s: float,
    mode: Mode,
    sharing: Sharing | None = None,
    seeds: tuple[int, int] = (1, 2),
) -> float:
    """Return the attainment of chats or of long prompts, whichever is lower.

    Nine of ten calls may be chats.
    """
    slo = Slo(name="mixed", ttft_s=7.0, tpot_s=0.006)
    load = chats_between_long(chats_per_s, long_per_s, slo, seeds)
    score = served(load, 2, mode, ONE_CORE_25M, sharing)
    kinds = score.where(_is_long), score.where(lambda call: not _is_long(call))
    return min(kind.attainment for kind in kinds if kind.outcomes)


@pytest.mark.long
@pytest.mark.parametrize("rates", [(4.0, 0.5), (4.8, 0.6)])
def test_adaptive_keeps_up_with_the_better_mode_on_long_prompts_between_chats(
    rates: tuple[float, float],
):
    """At the first rates both are as good, at the second disaggregation is better.

    A run has a dozen long prompts, so the mean of several is compared.
    """
    apart, together, adaptive = (
        fmean(worst_of_two_kinds(*rates, mode, seeds=(n, n + 100)) for n in range(1, 7))
        for mode in ("disaggregated", "colocated", "adaptive")
    )
    assert adaptive >= 0.95 * max(apart, together)


BUS = Sharing(
    decode_beside_decode=1.6,
    decode_beside_prompt=1.2,
    prompt_beside_decode=1.1,
    prompt_beside_prompt=1.1,
)


@pytest.mark.long
def test_adaptive_does_not_have_both_nodes_decode_where_they_share_one_memory_bus():
    """Decode steps take much longer then: less is decoded, and prompts get less of a node."""
    apart = worst_of_two_kinds(3.0, 0.25, "disaggregated", BUS)
    assert worst_of_two_kinds(3.0, 0.25, "adaptive", BUS) >= 0.95 * apart


@pytest.mark.long
def test_a_loose_promise_has_both_nodes_decode_also_on_one_memory_bus():
    """Large steps within a loose TPOT leave time for more places on two nodes than on one."""
    slo = Slo(name="short", ttft_s=0.7, tpot_s=0.015, hold_s=0.63)
    prompts, answers = lognormal(48, 0.4, 128), lognormal(96, 0.3, 192)
    load = calls("s", poisson(30.0, 8, seed=1), prompts, answers, slo, most_output=1)
    apart, together, adaptive = (
        served(load, 2, mode, ONE_CORE_25M, BUS).attainment
        for mode in ("disaggregated", "colocated", "adaptive")
    )
    assert apart < 0.9 * together
    assert adaptive > 0.95 * together


@pytest.mark.long
def test_under_overload_prompts_do_not_wait_for_places_that_handoffs_take():
    """On the decode node, one whose prompt is computed goes before one whose prompt is not."""
    slo = Slo(name="mixed", ttft_s=7.0, tpot_s=0.006, hold_s=6.3)
    loads = [chats_between_long(6.5, 0.55, slo, seeds) for seeds in ((1, 2), (2, 102))]
    apart, adaptive = (
        sum(served(load, 2, mode, ONE_CORE_25M, BUS).attainment for load in loads)
        for mode in ("disaggregated", "adaptive")
    )
    assert apart < 0.95 * len(loads)
    assert adaptive >= 0.92 * apart


@pytest.mark.parametrize("tpot_s", matrix([0.006, 0.024], 1))
def test_long_prompts_alone_do_not_harm_each_other_where_nodes_do_both(tpot_s: float):
    """Answers are short: a step of another request's prompt could take most of their time."""
    slo = Slo(name="long", ttft_s=7.0, tpot_s=tpot_s)
    load = calls("d", poisson(0.7, 100, seed=1), fixed(4096), fixed(16), slo, most_output=1)
    apart, together, adaptive = (
        served(load, 2, mode, ONE_CORE_25M).attainment
        for mode in ("disaggregated", "colocated", "adaptive")
    )
    assert adaptive >= 0.95 * max(apart, together)
