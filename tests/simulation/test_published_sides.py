"""Published rules of adaptive mode: each gains what its paper says, against handing off always."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from pdserve.commands.bench.compare.policies import PolicyContestant
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.simulation.call import Call
from pdserve.protocol import Prompt, Slo
from pdserve.settings.config import (
    CoordinatorConfig,
    Mode,
    PolicyConfig,
    RouterName,
    RoutingConfig,
)
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.errors import ConfigError
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score
from tests.simulation.workload import Length, calls, lognormal, merged, poisson, uniform

SLO = Slo(ttft_s=1.5, tpot_s=0.06)
SMALL = replace(A100_13B, num_kv_tokens=48 * 1024)  # not room for all conversations
HANDED_OFF: tuple[Mode, RouterName] = ("disaggregated", "predicted")


def conversations(
    per_s: float, until_s: float, first: Length, appended: Length, seed: int
) -> list[Call]:
    """Eight turns each; every prompt extends the one before, two seconds after its answer."""
    random, made = Random(seed), []
    for number, at_s in enumerate(poisson(per_s, until_s, seed=seed)):
        tokens, before = [number] * first(random), ""
        for turn in range(8):
            call_id = f"{'later' if turn else 'first'}-{number}-{turn}"
            num_output = random.randint(40, 80)
            made.append(
                Call(call_id, at_s, Prompt(tokens), num_output, SLO, 256, after=before, think_s=2.0)
            )
            before, tokens = call_id, tokens + [1000 + number] * appended(random)
    return merged(made)


@cache
def crowded(mode: Mode, router: RouterName) -> Score:
    """More prompts than one prefill node computes, beside three decode nodes."""
    prompt, output = lognormal(1000, 0.6, 6000), lognormal(60, 0.5, 200)
    load = calls("a", poisson(8, 30, seed=1), prompt, output, SLO)
    return fleet(1, 3, mode, load, PolicyConfig(), router=router).score


@cache
def talking(mode: Mode, router: RouterName) -> Score:
    """Conversations whose KV the prefill node cannot keep, as it computes all first prompts.

    The longest waits are those of a few crowded seconds, so of three minutes apart.
    """
    loads = (conversations(1.2, 60, uniform(3000, 6000), uniform(100, 300), n) for n in (3, 4, 5))
    runs = [fleet(1, 3, mode, load, PolicyConfig(), SMALL, router=router) for load in loads]
    return Score([outcome for run in runs for outcome in run.score.outcomes])


def later_turns(score: Score) -> Score:
    return score.where(lambda call: call.call_id.startswith("later"))


def test_deflected_prompts_do_not_wait_for_prefill_nodes() -> None:
    """The paper: P95 of the TTFT up to 81 % less, attainment up to 79 % more."""
    before, deflected = crowded(*HANDED_OFF), crowded("adaptive", "deflection")
    assert deflected.ttft_s(95) < 0.2 * before.ttft_s(95)
    assert deflected.attainment > 1.1 * before.attainment
    assert deflected.tpot_attainment > 0.99


@pytest.mark.long
def test_a_threshold_on_uncached_tokens_raises_throughput() -> None:
    """The paper: up to 54 % more; its prefill nodes are elsewhere, and here they are too few."""
    before, by_length = crowded(*HANDED_OFF), crowded("adaptive", "prfaas")
    assert by_length.tokens_per_s > 1.1 * before.tokens_per_s
    assert by_length.attainment > 1.1 * before.attainment


@pytest.mark.long
def test_placed_conversations_are_sooner_than_placed_turns() -> None:
    """The paper: P95 of the time to the first token 51 % less."""
    before, placed = later_turns(talking(*HANDED_OFF)), later_turns(talking("adaptive", "conserve"))
    assert placed.ttft_s(95) < 0.5 * before.ttft_s(95)


@pytest.mark.long
def test_weighed_later_turns_are_sooner_and_keep_their_tpot() -> None:
    """The paper: TTFT of later turns 68 % less; unlike placed ones, they shun full nodes."""
    before, weighed = later_turns(talking(*HANDED_OFF)), later_turns(talking("adaptive", "ppd"))
    placed = later_turns(talking("adaptive", "conserve"))
    assert weighed.ttft_s(95) < 0.32 * before.ttft_s(95)
    assert weighed.ttft_s(95) < placed.ttft_s(95)
    assert weighed.tpot_s(95) < placed.tpot_s(95)


@pytest.mark.parametrize("router", matrix(["conserve", "ppd"], 1))
def test_first_turns_are_handed_off(router: RouterName) -> None:
    """Without conversations, these two are disaggregated mode."""
    assert crowded("adaptive", router).attainment == crowded(*HANDED_OFF).attainment


@pytest.mark.parametrize("config", [ClusterConfig, CoordinatorConfig])
def test_they_are_refused_where_they_would_decide_nothing(config: type[ConfigStruct]) -> None:
    routing = RoutingConfig(router="ppd")
    config(mode="adaptive", routing=routing)
    with pytest.raises(ValueError, match="ppd decides in mode adaptive, not in disaggregated"):
        config(routing=routing)
    with pytest.raises(ConfigError, match=r"--policies ppd: .*not in colocated"):
        PolicyContestant.parse("ppd", "colocated")
