"""`pdserve plan`: the cheapest deployment that serves a load, its cost, and how to start it."""

from __future__ import annotations

import json
import shlex

import jsonschema
import pytest

from pdserve.cli.main import build_parser
from pdserve.errors import ConfigError
from pdserve.simulation.plan.config import PlanConfig, Prices
from pdserve.simulation.plan.cost import price_per_hour
from pdserve.simulation.plan.run import PlanReport, answer, commands, helm_values
from pdserve.simulation.plan.search import candidates, front
from pdserve.simulation.plan.table import tables
from pdserve.simulation.predict.deployment import Deployment
from tests.architecture.repository import ROOT

LOAD = PlanConfig(
    scenario="conversation",
    calibration="a100-13b",
    rate=30.0,
    requests=120,
    ttft_s=1.0,
    tpot_s=0.05,
    max_nodes=4,
    price=["prefill=3", "decode=1"],
)


@pytest.fixture(scope="module")
def plan() -> PlanReport:
    return answer(LOAD)


def test_nothing_cheaper_that_was_tried_serves_the_load(plan: PlanReport) -> None:
    assert plan.chosen is not None
    chosen = plan.chosen.tried
    assert chosen.attainment >= plan.target
    for one in plan.tried:
        if one.cost.per_hour < chosen.cost.per_hour:
            assert one.attainment < plan.target
    assert plan.chosen.goodput.rate >= LOAD.rate


def test_what_has_no_time_for_the_load_is_not_even_tried(plan: PlanReport) -> None:
    least = LOAD.rate / plan.knee.prefill_per_s + LOAD.rate / plan.knee.decode_per_s
    assert all(one.deployment.num_nodes >= least for one in plan.tried)


def test_all_money_is_spent_on_tokens_or_on_idling(plan: PlanReport) -> None:
    for one in plan.tried:
        cost, result = one.cost, one.result
        uncached = result.prompt_tokens - result.cached_tokens
        tokens = (cost.per_million_uncached or 0) * uncached
        tokens += (cost.per_million_output or 0) * result.output_tokens
        spent = tokens / 1e6 + cost.idle_share * cost.per_hour * result.seconds / 3600
        assert spent == pytest.approx(cost.per_hour * result.seconds / 3600)


def test_littles_law_holds() -> None:
    """Over a time that is long against that of a request."""
    modes = {"modes": ["colocated"], "max_nodes": 1}
    plan = answer(PlanConfig(**(vars_of(LOAD) | {"rate": 8.0, "requests": 200} | modes)))
    assert plan.chosen is not None
    result = plan.chosen.tried.result
    rate = result.score.sent / result.seconds
    assert result.in_flight == pytest.approx(rate * result.mean_e2e_s, rel=0.15)


def test_twice_the_load_costs_more_and_too_much_is_said(plan: PlanReport) -> None:
    assert plan.chosen is not None
    too_much = answer(PlanConfig(**(vars_of(LOAD) | {"rate": 1000.0, "max_nodes": 2})))
    assert too_much.chosen is None
    assert "None of these serves the load" in "\n".join(str(part) for part in tables(too_much))


def test_the_chosen_one_is_robust_or_the_plan_says_so(plan: PlanReport) -> None:
    what = [change.what for change in plan.changes]
    assert what[:3] == ["rate +20%", "lengths +20%", "step times +20%"]
    assert len(what) == 6
    for change in plan.changes:
        assert change.deployment is not None or change.attainment < plan.target


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "adaptive"])
def test_what_it_prints_can_be_run(mode: str) -> None:
    deployment = Deployment(mode, 0 if mode == "colocated" else 2, 3)
    schema = json.loads((ROOT / "deploy/helm/pdserve/values.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(helm_values(deployment))
    for line in commands(deployment):
        words = shlex.split(line.partition("#")[0].replace("ADDRESS", "10.0.0.1:8001"))
        assert words[0] == "pdserve"
        build_parser().parse_args(words[1:])


def test_candidates_come_by_price_and_the_front_only_falls(plan: PlanReport) -> None:
    prices = Prices(prefill=3.0, decode=1.0)
    cost = [price_per_hour(one, prices) for one in candidates("disaggregated", 5, prices)]
    assert cost == sorted(cost)
    assert len(cost) == 10
    kept = front(plan.tried)
    assert [one.cost.per_hour for one in kept] == sorted(one.cost.per_hour for one in kept)
    assert [one.tpot_ms for one in kept] == sorted((one.tpot_ms for one in kept), reverse=True)


@pytest.mark.parametrize("word", ["prefill", "prefill=x", "gpu=2", "decode=0", "decode=-1"])
def test_what_is_no_price_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="no price: write prefill=AMOUNT"):
        _ = PlanConfig(price=[word]).prices


def test_a_rate_is_needed() -> None:
    with pytest.raises(ConfigError, match="--rate"):
        answer(PlanConfig(calibration="a100-13b", scenario="conversation"))


def vars_of(config: PlanConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}
