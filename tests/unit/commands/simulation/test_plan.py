"""`pdserve plan`: the cheapest deployment that serves a load, its cost, and how to start it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import msgspec
import pytest
from rich.console import Console

from pdserve.commands.bench.compare.goodput import Goodput
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.cli.main import build_parser
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.simulation.machine import scaled
from pdserve.commands.simulation.plan.choice import choose
from pdserve.commands.simulation.plan.commands import commands, helm_values
from pdserve.commands.simulation.plan.config import PlanConfig, Prices
from pdserve.commands.simulation.plan.cost import price_per_hour
from pdserve.commands.simulation.plan.knee import knee_of
from pdserve.commands.simulation.plan.report import Best, PlanReport
from pdserve.commands.simulation.plan.run import answer
from pdserve.commands.simulation.plan.search import candidates, front
from pdserve.commands.simulation.plan.table import tables
from pdserve.commands.simulation.predict.answer import load_calibration, question_of, rig_of
from pdserve.commands.simulation.predict.deployment import Deployment
from pdserve.commands.simulation.predict.load import most_tokens
from pdserve.measured.calibration import write_calibration
from pdserve.settings.config import NodeConfig, PolicyConfig
from pdserve.settings.flags import config_from
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import CalibrationError, ConfigError
from tests.architecture.repository import ROOT

LOAD = PlanConfig(
    scenario="conversation",
    calibration="a100-13b",
    rate=30.0,
    requests=25,
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
    assert plan.chosen.goodput is not None
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


@pytest.mark.long
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
        assert change.attainment is not None
        assert change.deployment is not None or change.attainment < plan.target


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "adaptive", "flowing"])
def test_what_it_prints_can_be_run(mode: str) -> None:
    """And starts what was simulated: its limits, and the promise that policies keep to."""
    deployment = Deployment(mode, 0 if mode == "colocated" else 2, 3)
    calibration, promise = load_calibration("a100-13b"), Promise(1.0, 0.05)
    schema = json.loads((ROOT / "deploy/helm/pdserve/values.schema.json").read_text())
    values = helm_values(deployment, calibration, promise, PolicyConfig())
    jsonschema.Draft7Validator(schema).validate(values)
    pools = [values[role] for role in ("prefill", "decode") if role in values]
    assert [pool["device"] for pool in pools] == ["cuda"] * len(pools)  # type: ignore[index]
    assert values["coordinator"]["settings"]["routing.default_class"] == "planned"  # type: ignore[index]
    parsed = []
    for line in commands(deployment, calibration, promise, PolicyConfig()):
        words = shlex.split(line.partition("#")[0].replace("ADDRESS", "10.0.0.1:8001"))
        assert words[0] == "pdserve"
        parsed.append(build_parser().parse_args(words[1:]))
    config = config_from(ClusterConfig, parsed[0])
    assert (config.mode, config.decode) == (mode, 3)
    assert config.prefill == (None if mode == "colocated" else 2)
    assert config.routing.slo_classes == ["planned ttft=1 tpot=0.05"]
    assert (config.engine.max_batch_size, config.engine.token_budget) == (256, 2048)
    assert (config.engine.block_size, config.engine.dtype) == (64, "bfloat16")
    assert config.engine.device == "cuda"
    kv_bytes, layout = parse_bytes(config.engine.kv_memory), calibration.shape.layout
    assert layout.blocks_in_budget(kv_bytes, 32768) == calibration.limits.num_blocks


def test_nodes_of_several_gpus_have_the_pool_that_was_simulated() -> None:
    """Their parts are uneven, and the largest one decides what fits."""
    uneven = msgspec.structs.replace(load_calibration("a100-13b"), pipeline_parallel=3)
    line = commands(Deployment("colocated", 0, 1), uneven, Promise(1.0, 0.05), PolicyConfig())[0]
    config = config_from(ClusterConfig, build_parser().parse_args(shlex.split(line)[1:]))
    parts = uneven.shape.layout.parts(1, 3)
    of_one = parse_bytes(config.engine.kv_memory) / len(parts)
    assert of_one / max(part.block_bytes for part in parts) == uneven.limits.num_blocks
    assert len({part.block_bytes for part in parts}) > 1


def test_nodes_on_cpus_stay_there_and_have_the_threads_that_were_calibrated() -> None:
    """And the policies that were simulated."""
    calibration = msgspec.structs.replace(load_calibration("core-53m"), cpus=3)
    deployment, policy = Deployment("colocated", 0, 1), PolicyConfig(prefill_policy="sjf-aging")
    values = helm_values(deployment, calibration, Promise(1, 1), policy)["decode"]
    assert isinstance(values, dict)
    assert values["device"] == "cpu"
    assert values["resources"] == {"requests": {"cpu": "3"}}
    assert values["settings"]["engine.threads"] == 3
    assert values["settings"]["policy.prefill_policy"] == "sjf-aging"
    up, _, node = commands(deployment, calibration, Promise(1, 1), policy)
    for struct, line in ((ClusterConfig, up), (NodeConfig, node)):
        words = shlex.split(line.partition("#")[0].replace("ADDRESS", "10.0.0.1:8001"))
        config = config_from(struct, build_parser().parse_args(words[1:]))
        assert (config.engine.device, config.engine.threads) == ("cpu", 3)
        assert config.policy == policy


@pytest.mark.long
def test_what_prompts_share_takes_no_time_for_prompts(tmp_path: Path) -> None:
    """Else nothing small would be tried for agents, whose prompts are mostly in the cache."""
    lines = ['{"format": "pdserve trace 1", "block_tokens": 64}']
    lines += [
        json.dumps(
            {"id": i, "timestamp": 100 * i, "input_length": 6432, "output_length": 8}
            | {"hash_ids": [*range(96), *range(1000 + 4 * i, 1004 + 4 * i)]}
        )
        for i in range(60)
    ]
    (tmp_path / "trace").write_text("\n".join(lines))
    shared = {"trace": str(tmp_path / "trace"), "requests": 60, "rate": 12.0}
    shared |= {"ttft_s": 3.0}  # or the first, of which nothing is cached yet, would be refused
    config = PlanConfig(**(vars_of(LOAD) | shared | {"modes": ["disaggregated"]}))
    calibration = load_calibration("a100-13b")
    rig = rig_of(config, calibration, admission=True)
    question = question_of(config)
    knee = knee_of(rig, question.case(calibration, 0), Promise(1.0, 0.05), 60)
    assert knee.mean_shared == pytest.approx(96 * 64 * 59 / 60)
    alone = knee_of(rig, question.case(calibration, 0), Promise(1.0, 0.05), 10)
    assert knee.prefill_per_s > alone.prefill_per_s > 0
    plan = answer(config)
    assert plan.chosen is not None
    assert plan.chosen.tried.deployment.prefill <= 2, "of ten that their whole prompts would take"
    assert plan.chosen.tried.result.cached_tokens > 0.9 * knee.mean_shared * 60


@pytest.mark.long
def test_what_cannot_be_predicted_is_said_and_stops_nothing() -> None:
    """Lengths that grow by a fifth are beyond what the model takes: the plan stands."""
    long = {"scenario": "long-prompts", "length_scale": 7.5, "rate": 0.05, "requests": 13}
    far = {"ttft_s": 60.0, "tpot_s": 1.0, "modes": ["colocated"], "max_nodes": 2}
    plan = answer(PlanConfig(**(vars_of(LOAD) | long | far)))
    assert plan.chosen is not None
    unknown = {change.what: change.unknown for change in plan.changes if change.attainment is None}
    assert list(unknown) == ["lengths +20%"]
    assert "do not fit a model" in unknown["lengths +20%"]
    assert "unknown" in said(plan)


@pytest.mark.long
def test_a_load_beyond_the_calibration_is_refused(tmp_path: Path) -> None:
    calibration = json.loads(
        (ROOT / "pdserve/commands/simulation/calibrations/a100-13b.json").read_text()
    )
    calibration["ranges"]["prompt_tokens"] = [1, 20]
    (tmp_path / "narrow.json").write_text(json.dumps(calibration))
    narrow = {"calibration": str(tmp_path / "narrow.json")}
    with pytest.raises(CalibrationError, match="outside of what was calibrated, 1 to 20"):
        answer(PlanConfig(**(vars_of(LOAD) | narrow)))
    calibration["ranges"] |= {"prompt_tokens": [1, 32768], "batch": [1, 16]}
    (tmp_path / "narrow.json").write_text(json.dumps(calibration))
    modes = {"modes": ["disaggregated"], "max_nodes": 6, "rate": 25.0, "requests": 60}
    plan = answer(PlanConfig(**(vars_of(LOAD) | narrow | modes)))
    assert plan.chosen is not None
    assert any("batch" in why for why in plan.unknown.values())
    assert "not predicted: disaggregated" in said(plan)
    goodput = plan.chosen.goodput
    assert goodput is not None
    assert goodput.where == "above the rates", "higher ones have larger batches"
    assert f"{goodput.rate:.3g} or more" in said(plan)


def test_blocks_of_a_state_are_no_room_for_tokens() -> None:
    """A request that has room nowhere would be waited for without end."""
    made = load_calibration("core-53m")
    layout = made.shape.layout
    shape = msgspec.structs.replace(made.shape, state_bytes=100 * layout.block_bytes)
    limits = msgspec.structs.replace(made.limits, num_blocks=204)
    made = msgspec.structs.replace(made, shape=shape, limits=limits)
    assert most_tokens(made) == layout.tokens_in(4)


def said(plan: PlanReport) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        for part in tables(plan):
            console.print(part)
    return captured.get()


def best(plan: PlanReport, cost: float, rate: float | None, attainment: float = 0.95) -> Best:
    """A deployment that serves the load at this cost; None: its goodput is not known."""
    assert plan.chosen is not None
    tried = plan.chosen.tried
    name = f"{cost} {rate} {attainment}"
    return Best(
        msgspec.structs.replace(
            tried,
            deployment=Deployment("colocated", 0, 1 + sum(map(ord, name))),
            attainment=attainment,
            cost=msgspec.structs.replace(tried.cost, per_hour=cost),
        ),
        None if rate is None else Goodput(rate=rate, where="crossing", low=rate, high=rate),
    )


@pytest.mark.parametrize(
    ("found", "chosen", "told"),
    [
        ([(3, 48.0), (3, 49.6), (4, 90.0)], 1, "2 deployments cost 3 an hour; its goodput is the"),
        ([(3, 48.0), (2, 10.0)], 1, "nothing cheaper serves the load; next is colocated"),
        ([(3, 48.0)], 0, "nothing cheaper serves the load"),
        ([(3, None), (3, 48.0)], 1, "its goodput is 48/s, and that of colocated"),
        ([(3, 48.0, 0.91), (3, 48.0, 0.99)], 1, "of equal goodput, most of its requests are in"),
        ([(3, 48.01, 0.95), (3, 48.0, 0.95)], 0, "is as good"),
        ([(0.1 + 0.2, 48.0), (0.3, 40.0)], 0, "2 deployments cost 0.3 an hour"),
    ],
)
def test_of_equal_cost_the_better_goodput_is_taken_and_the_reason_told(
    plan: PlanReport, found: list[tuple[float, float | None]], chosen: int, told: str
) -> None:
    bests = [best(plan, *one) for one in found]
    taken, why = choose(bests)
    assert taken is bests[chosen]
    assert told in why


@pytest.mark.long
def test_all_deployments_of_the_least_cost_are_compared(plan: PlanReport) -> None:
    """And why one of them is taken is printed."""
    one_price = answer(PlanConfig(**(vars_of(LOAD) | {"price": [], "modes": ["adaptive"]})))
    assert one_price.chosen is not None
    num_nodes = one_price.chosen.tried.deployment.num_nodes
    of_that_price = [one for one in one_price.tried if one.deployment.num_nodes == num_nodes]
    assert len(of_that_price) == num_nodes - 1
    goodputs = [one.goodput.rate for one in one_price.cheapest if one.goodput]
    assert one_price.chosen.goodput is not None
    assert one_price.chosen.goodput.rate == max(goodputs)
    assert one_price.why in said(one_price)


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


def test_what_is_not_there_is_named_before_anything_is_simulated() -> None:
    with pytest.raises(CalibrationError, match=r"none.json; built in are a100-13b, core-53m"):
        load_calibration("none.json")
    with pytest.raises(ConfigError, match=r"--plot /none/p.png: there is no directory /none"):
        PlanConfig(devices=["h100"], plot="/none/p.png").check()


def test_a_rate_is_needed() -> None:
    with pytest.raises(ConfigError, match="--rate"):
        answer(PlanConfig(calibration="a100-13b", scenario="conversation"))


def vars_of(config: PlanConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@pytest.mark.long
def test_prefill_nodes_with_other_weights_are_tried_too(tmp_path: Path) -> None:
    """With their own times: half as long for prompts. One such node does what two of others do."""
    decode = msgspec.structs.replace(load_calibration("a100-13b"), quantisation="int4")
    half = msgspec.structs.replace(
        decode,
        quantisation="int8",
        prefill=scaled(decode.prefill, 0.5),
        mixed=scaled(decode.mixed, 0.5),
        believed=None,
    )
    files = {}
    for one in (decode, half):
        files[one.quantisation] = str(tmp_path / f"{one.quantisation}.json")
        write_calibration(one, Path(files[one.quantisation]))
    asked = {
        "rate": 12.0,
        "calibration": files["int4"],
        "prefill_calibration": files["int8"],
        "modes": ["disaggregated"],
        "max_nodes": 3,
    }
    plan = answer(PlanConfig(**(vars_of(LOAD) | asked)))
    assert plan.knee.other_prefill_per_s > 1.5 * plan.knee.prefill_per_s
    by_weights = {one.deployment.prefill_weights for one in plan.tried}
    assert by_weights == {"", "int8"}
    pair = {
        one.deployment.prefill_weights: one.result.parts.prefill
        for one in plan.tried
        if (one.deployment.prefill, one.deployment.decode) == (1, 1)
    }
    assert (pair["int8"] or 0) < 0.8 * (pair[""] or 0)
    chosen = Deployment("disaggregated", 1, 1, prefill_weights="int8")
    assert chosen.text == "disaggregated 1P1D (prefill int8)"
    line = commands(chosen, decode, Promise(1.0, 0.05), PolicyConfig())[0]
    assert "engine.quantization=int4" in line
    assert "engine.prefill_quantization=int8" in line


def test_calibrations_of_a_pair_are_of_one_model_and_of_two_weights(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for changed, said in (
        ({"model": "another"}, "calibrate both with one model"),
        ({}, "leave --prefill-calibration out"),
    ):
        other = msgspec.structs.replace(load_calibration("a100-13b"), **changed)
        write_calibration(other, path)
        with pytest.raises(CalibrationError, match=said):
            answer(PlanConfig(**(vars_of(LOAD) | {"prefill_calibration": str(path)})))
