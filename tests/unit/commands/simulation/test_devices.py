"""`pdserve plan --devices`: the architecture that a model, a load and a promise ask for."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.commands.bench.checkpoints.model_config import model_named
from pdserve.commands.bench.checkpoints.random_checkpoint import config_of
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.plan.config import PlanConfig
from pdserve.commands.simulation.plan.devices.answer import (
    DevicesReport,
    answer,
    commands,
)
from pdserve.commands.simulation.plan.devices.catalogue import DEVICES
from pdserve.commands.simulation.plan.devices.plot import tpot_curve
from pdserve.commands.simulation.plan.devices.roofline import NodeType, calibration_of
from pdserve.commands.simulation.plan.devices.rounding import OF_KV, OF_WEIGHTS
from pdserve.commands.simulation.plan.devices.search import Choice, Compared, compare
from pdserve.commands.simulation.plan.devices.sizing import Load, Pool, Sized
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.engine.models.config import parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.kv import KvDtype
from pdserve.measured.perf_model import PerfModel
from pdserve.shared.errors import ConfigError
from tests.architecture.repository import ROOT

CHAT = Load(20.0, 1000, 300, Promise(1.0, 0.05), 0.9)
TIGHT = Load(20.0, 8000, 300, Promise(0.6, 0.015), 0.9)
# 1,000 users who read 30 tokens a second, all the time, answers of 400.
USERS = Load(1000 / (400 / 30), 500, 400, Promise(1.0, 1 / 30), 0.9)
# 5,000 requests a second of 3k tokens in and 400 out.
CROWD = Load(5000.0, 3000, 400, Promise(1.0, 0.05), 0.9)


def planned(model: str, load: Load, *names: str, longest: int = 8192) -> Compared:
    devices = [DEVICES[name] for name in names]
    prices = {device.name: device.price for device in devices}
    longest = max(longest, load.prompt + load.output)
    return compare(model_named(model), model, devices, prices, load, longest)


@pytest.mark.parametrize(
    ("model", "load", "architecture", "says"),
    [
        ("8b", CHAT, "replicate", ""),
        ("70b", CHAT, "shard", "memory: weights take 141 GB"),
        ("405b", Load(1.0, 1000, 300, Promise(4.0, 0.1), 0.9), "shard", "memory: weights take 812"),
        ("8b", USERS, "replicate", ""),
        ("8b", TIGHT, "disaggregate", ""),
        ("70b", CROWD, "disaggregate", "memory"),
    ],
)
def test_what_to_build_of_devices_of_80_gb(
    model: str, load: Load, architecture: str, says: str
) -> None:
    compared = planned(model, load, "h100")
    assert compared.chosen is not None
    assert compared.chosen.architecture == architecture
    assert ("replicate" in compared.lacking) is bool(says)
    assert says in compared.lacking.get("replicate", "")


def test_a_model_of_405b_needs_16_devices_of_80_gb() -> None:
    # 812 GB of weights, of which 16 devices have 51 GB each, and 8 would have more than they are.
    load = Load(0.2, 1000, 300, Promise(4.0, 0.1), 0.9)
    chosen = planned("405b", load, "h100").chosen
    assert chosen is not None
    ((sized, pool),) = chosen.pools
    assert (sized.node.num_devices, pool.count) == (16, 1)


def test_a_thousand_users_fit_the_memory_and_the_bandwidth_of_their_devices() -> None:
    chosen = planned("8b", USERS, "h100").chosen
    assert chosen is not None
    ((sized, pool),) = chosen.pools
    in_flight = USERS.rate * USERS.output * sized.step_s(USERS, pool.batch, 0.0)
    assert in_flight <= 1000, "who reads 30 tokens a second is served faster"
    held = pool.batch * (USERS.prompt + USERS.output)
    assert held <= sized.calibration.shape.layout.tokens_in(sized.calibration.limits.num_blocks)
    assert sized.step_s(USERS, pool.batch, 0.0) <= USERS.promise.tpot_s


def test_a_crowd_needs_at_least_the_arithmetic_of_its_tokens() -> None:
    tokens_per_s = CROWD.rate * (CROWD.prompt + CROWD.output)
    flops = 2 * 8.03e9 * tokens_per_s
    for name in ("h100", "b200"):
        chosen = planned("8b", CROWD, name).chosen
        assert chosen is not None
        num_devices = sum(sized.node.num_devices * pool.count for sized, pool in chosen.pools)
        least = ceil(flops / DEVICES[name].flops_per_s)
        assert least < num_devices < 3 * least


def test_what_is_fast_enough_decides_between_devices() -> None:
    slow = planned("70b", Load(10.0, 2000, 300, Promise(0.2, 0.005), 0.9), "l40s")
    assert slow.chosen is None
    assert slow.lacking["shard"].startswith("TPOT: a step of one takes")
    cheap = planned("8b", CHAT, "l40s", "h100", "b200").chosen
    assert cheap is not None
    dear = [one for name in ("l40s", "h100", "b200") if (one := planned("8b", CHAT, name).chosen)]
    assert cheap.price <= min(one.price for one in dear)


@pytest.mark.parametrize(
    ("model", "ranks", "weights", "gb"),
    [("70b", 1, "int4", 42), ("405b", 8, "fp8", 52), ("405b", 4, "int4", 59)],
)
def test_fewer_bits_fit_fewer_devices_of_80_gb(
    model: str, ranks: int, weights: str, gb: float
) -> None:
    made = model_named(model)
    fits = calibration_of(made, model, NodeType(DEVICES["h100"], ranks, weights=weights), 8192)
    assert fits.shape.weight_bytes / ranks == pytest.approx(gb * 1e9, rel=0.03)
    assert fits.quantisation == weights
    with pytest.raises(ConfigError, match="weights take"):
        calibration_of(made, model, NodeType(DEVICES["h100"], ranks), 8192)


@pytest.mark.parametrize(("device", "rate"), [("h100", 400.0), ("epyc-9654", 20.0)])
def test_what_is_rounded_is_offered_and_not_chosen(device: str, rate: float) -> None:
    compared = planned("8b", Load(rate, 100, 200, Promise(4.0, 0.1), 0.9), device)
    assert compared.chosen is not None
    assert compared.chosen.is_as_stored
    assert all(one.off_by == 0 for one in compared.best.values())
    assert compared.rounded
    for one in compared.rounded.values():
        assert one.off_by > 0
        assert one.price < compared.chosen.price


def test_of_70b_in_4_bits_there_are_replicas() -> None:
    compared = planned("70b", CHAT, "h100")
    assert compared.chosen is not None
    ((sized, _),) = compared.rounded["replicate"].pools
    assert (sized.node.num_devices, sized.node.weights) == (1, "int4")
    assert compared.rounded["replicate"].price < compared.chosen.price
    assert compared.rounded["replicate"].off_by >= OF_WEIGHTS["int4"]["int4"]


def test_where_the_model_as_it_is_stored_does_not_serve_fewer_bits_do() -> None:
    slow = Load(1.0, 500, 100, Promise(4.0, 0.025), 0.9)
    compared = planned("8b", slow, "l40s", longest=2048)
    assert compared.chosen is not None
    assert ("replicate" in compared.rounded) is ("replicate" in compared.lacking) is True


def test_fewer_bits_save_the_time_of_bytes_and_not_of_arithmetic() -> None:
    model, load = model_named("8b"), Load(1.0, 1000, 300, Promise(1.0, 0.05), 0.9)
    stored, int8, int4, coded = (
        Sized(node, calibration_of(model, "8b", node, 4096))
        for node in (
            NodeType(DEVICES["h100"]),
            NodeType(DEVICES["h100"], weights="int8"),
            NodeType(DEVICES["h100"], weights="int4"),
            NodeType(DEVICES["h100"], kv=KvDtype.INT8),
        )
    )
    assert 1.5 < stored.step_s(load, 1, 0.0) / int8.step_s(load, 1, 0.0) < 2
    assert 2 < stored.step_s(load, 1, 0.0) / int4.step_s(load, 1, 0.0) < 3.6
    assert stored.step_s(load, 0, 4096) == pytest.approx(int4.step_s(load, 0, 4096), rel=0.05)
    assert stored.calibration.mixed.context_s / coded.calibration.mixed.context_s == pytest.approx(
        256 / 132
    )


@pytest.mark.parametrize(
    ("model", "node"),
    [
        ("mla-160m", NodeType(DEVICES["h100"], weights="int4")),
        ("mla-160m", NodeType(DEVICES["h100"], kv=KvDtype.INT8)),
        ("hybrid-160m", NodeType(DEVICES["h100"], kv=KvDtype.FP8)),
    ],
)
def test_what_gpus_do_not_compute_is_not_planned(model: str, node: NodeType) -> None:
    with pytest.raises(ConfigError, match="is for CPUs"):
        calibration_of(model_named(model), model, node, 4096)


def test_more_promised_is_never_cheaper() -> None:
    prices = []
    for tpot_s in (0.1, 0.05, 0.03, 0.02, 0.015):
        load = Load(40.0, 2000, 300, Promise(1.0, tpot_s), 0.9)
        chosen = planned("8b", load, "h100").chosen
        assert chosen is not None
        prices.append(chosen.price)
    assert prices == sorted(prices)


def test_shares_fit_the_published_costs() -> None:
    shape = SHAPES["8b"] | {
        "vocab_size": 32_000,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    }
    model = parse_model_config(JsonFields(config_of(shape), "13b"))
    ours = calibration_of(model, "13b", NodeType(DEVICES["a100"]), 2048)
    published, made = PerfModel(load_calibration("a100-13b").mixed), PerfModel(ours.mixed)
    for count in (64, 128, 256, 512, 1024, 2048):
        assert made.prefill_s(count, 0, 2048) == pytest.approx(
            published.prefill_s(count, 0, 2048), rel=0.05
        )
    for batch in (1, 8, 32, 64, 128):
        assert made.decode_s(batch, 0) == pytest.approx(published.decode_s(batch, 0), rel=0.06)


def test_ranks_divide_what_they_read_and_meet_for_it() -> None:
    model = model_named("70b")
    two, four, eight = (
        Sized(node, calibration_of(model, "70b", node, 4096))
        for node in (NodeType(DEVICES["b200"], ranks) for ranks in (2, 4, 8))
    )
    times = [sized.step_s(CHAT, 8, 0.0) for sized in (two, four, eight)]
    assert times[0] > times[1] > times[2] > times[0] / 4


def test_the_knee_is_the_last_point_in_time() -> None:
    node = NodeType(DEVICES["h100"])
    sized = Sized(node, calibration_of(model_named("8b"), "8b", node, 4096))
    load = replace_tpot(CHAT, 0.02)
    rates, times, knee = tpot_curve(sized, load)
    assert times == sorted(times)
    assert rates == sorted(rates)
    assert times[knee] <= load.promise.tpot_s * 1e3 < times[-1]


def replace_tpot(load: Load, tpot_s: float) -> Load:
    return Load(load.rate, load.prompt, load.output, Promise(load.promise.ttft_s, tpot_s), 0.9)


ASKED = PlanConfig(
    devices=["h100"],
    model="8b",
    rate=12.0,
    lengths="600:40",
    ttft_s=0.5,
    tpot_s=0.03,
    requests=60,
    max_nodes=2,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> DevicesReport:
    return answer(replace(ASKED, plot=str(tmp_path_factory.mktemp("plan") / "plan.png")))


def test_what_was_sized_is_simulated(report: DevicesReport) -> None:
    assert report.chosen == "replicate"
    assert [row.architecture for row in report.rows] == ["replicate", "shard", "disaggregate"]
    for row in report.rows:
        assert row.simulated.attainment >= report.target
    assert "costs" in report.why


def test_the_plot_is_a_picture(report: DevicesReport) -> None:
    assert Path(report.plot).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"devices": ["h10"]}, "there is no such device; did you mean `h100`"),
        ({"lengths": "600"}, "write PROMPT:OUTPUT"),
        ({"lengths": "600:0"}, "write PROMPT:OUTPUT"),
        ({"lengths": "131072:1"}, "more than the 131072 of 8b"),
        ({"price": ["h100"]}, "write DEVICE=AMOUNT"),
        ({"price": ["h101=2"]}, "there is no such device"),
        ({"rate": 0.0}, "--rate"),
        ({"ttft_s": 0.0}, "--ttft-s and --tpot-s"),
    ],
)
def test_what_cannot_be_planned_is_named(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        answer(replace(ASKED, **wrong))


def test_pools_of_other_weights_are_told_both() -> None:
    nodes = (NodeType(DEVICES["h100"], weights=form) for form in ("int8", "int4"))
    model = model_named("8b")
    first, last = (Sized(node, calibration_of(model, "8b", node, 4096)) for node in nodes)
    pools = ((first, Pool(1, "prefill", "", 0.0)), (last, Pool(1, "decode", "", 8.0)))
    _, *nodes_of = commands(Choice("disaggregate", pools, 1.0), CHAT.promise)
    for line in nodes_of:
        assert "--set engine.quantization=int4 " in line
        assert "--set engine.prefill_quantization=int8 " in line


def test_how_far_off_forms_are_is_what_the_documents_say() -> None:
    text = (ROOT / "docs/FAILURES.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.+)\|$", text, re.MULTILINE)
    said = {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}
    found = {name: list(row.values()) for name, row in OF_WEIGHTS.items()}
    assert said == {"none": found.pop("bfloat16"), **found}
    for kv in (KvDtype.INT8, KvDtype.FP8):
        assert f"{OF_KV[kv]} with `{kv}`" in text


def test_what_starts_a_node_has_its_cores_and_the_promise() -> None:
    asked = replace(ASKED, devices=["epyc-9654"], rate=0.5, ttft_s=4.0, tpot_s=0.2, requests=20)
    commands = next(row.commands for row in answer(asked).rows if row.architecture == "replicate")
    assert "--slo-classes 'planned ttft=4 tpot=0.2'" in commands[0]
    assert "--set engine.threads=96 " in commands[1]


@pytest.mark.parametrize("name", ["trace", "prefill_calibration"])
def test_nothing_is_left_out_in_silence(name: str) -> None:
    with pytest.raises(ConfigError, match="not with --devices"):
        replace(ASKED, **{name: "file"}).check()


def test_only_devices_have_a_plot() -> None:
    with pytest.raises(ConfigError, match="--plot"):
        replace(ASKED, devices=[], plot="plan.png").check()
