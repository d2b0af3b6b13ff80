"""Several models of one coordinator: which one a name, a node or a metric is of."""

from __future__ import annotations

import asyncio
import math
import shutil
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from coordinator.generation import GenerationRequest
from coordinator.models.files import ModelFiles, read_all_model_files
from coordinator.models.model import Catalog, make_model
from coordinator.models.overview import whole_status
from coordinator.models.served import _LOOK_S, ServedModels
from coordinator.pools.wake_times import FIRST_WAKE_S
from coordinator.pools.wakes import FOLLOW_S, PAUSE_S, ModelNow, Waiting
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowProcess
from coordinator.service import CoordinatorService
from coordinator.text import Tokenizer
from pdserve.findings.checks import findings
from pdserve.findings.finding import Level
from pdserve.metrics import CoordinatorMetrics, pieces_of_all
from pdserve.protocol import (
    Drain,
    NodeHello,
    NodeRole,
    NodeState,
    Prompt,
    SamplingParams,
    SetRole,
    Welcome,
)
from pdserve.protocol.status import ClusterStatus, NodeStatus, WaitingClass
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.config import CheckpointConfig, CoordinatorConfig
from pdserve.settings.timeouts import SharedTimeouts
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError, ModelNotFound, PdserveError, TokenizerError
from pdserve.shared.slo import parse_slo_classes
from tests.checkpoints import make_checkpoint
from tests.fakes.generator import FakeGenerator, tiny_tokenizer
from tests.fakes.hellos import node_hello
from tests.fakes.members import join, report, said_to
from tests.fakes.statuses import node_status
from tests.unit.coordinator.api.harness import served as api_of

FILE = """
[models.small]
source = "same"
aliases = ["mini"]
[models.other]
source = "same"
dtype = "bfloat16"
tenants = ["payer"]
"""


@pytest.fixture
def all_files(tmp_path: Path) -> list[ModelFiles]:
    make_checkpoint(tmp_path / "same", "llama")
    (tmp_path / "m.toml").write_text(FILE)
    return read_all_model_files(CoordinatorConfig(models=str(tmp_path / "m.toml")))


@pytest.fixture
def served(all_files: list[ModelFiles]) -> ServedModels:
    return served_from(all_files)


def served_from(all_files: list[ModelFiles]) -> ServedModels:
    return ServedModels(
        CoordinatorConfig(max_inflight=7),
        all_files,
        parse_slo_classes(["standard"], "standard"),
        CoordinatorMetrics(),
        ManualClock(),
        "1",
        share_quotas=lambda number: None,
        process=FlowProcess(),
    )


def catalog() -> Catalog:
    small = make_model(FakeGenerator(), tiny_tokenizer(), ["small", "mini"])
    payers = frozenset({"payer"})
    return Catalog([small, make_model(FakeGenerator(), tiny_tokenizer(), ["big"], tenants=payers)])


def test_names_mean_models_and_some_are_for_some() -> None:
    models = catalog()
    assert models.names() == ["small", "mini"]
    assert models.names("payer") == ["small", "mini", "big"]
    assert models.find("mini").name == models.find(None).name == "small"
    assert models.find("big", "payer").name == "big"
    for name, tenant in (("big", ""), ("big", "other"), ("bigger", "payer")):
        with pytest.raises(ModelNotFound, match=f"no model '{name}'; this server has small, mini"):
            models.find(name, tenant)


async def test_a_node_joins_its_model_and_no_other(served: ServedModels) -> None:
    welcome = Welcome(coordinator_id="c", incarnation="1", protocol=PROTOCOL)
    service = CoordinatorService(served.clusters, welcome, SharedTimeouts())

    def joined(hello: NodeHello) -> str:
        return service.checked(hello).registered_name

    assert joined(node_hello("d0", model_id="same", model_name="small")) == "small"
    assert joined(node_hello("d0", model_id="same", model_name="other")) == "other"
    for wrong in (
        node_hello("d0", model_id="same"),  # of which of the two?
        node_hello("d0", model_id="same", model_name="third"),
        node_hello("d0", model_id="else", model_name="small"),
    ):
        with pytest.raises(ConfigError, match="start both with the same --models"):
            joined(wrong)
    join(served.clusters[0].registry, "d0", NodeRole.DECODE)
    again = node_hello("d0", incarnation="2", model_id="same", model_name="other")
    with pytest.raises(PdserveError, match="'d0' is attached already"):
        joined(again)  # it is a member still, though of another model


async def test_a_node_that_is_back_as_another_models_is_not_missed(served: ServedModels) -> None:
    first, second = served.clusters
    first.registry.remove(join(first.registry, "d0", NodeRole.DECODE, model_name="small"))
    assert [(node.node_id, node.model) for node in served.absent()] == [("d0", "small")]
    back = join(second.registry, "d0", NodeRole.DECODE)
    assert served.absent() == []
    assert not first.absent.misses(NodeRole.DECODE)
    second.registry.remove(back)
    assert len(served.absent()) == 1


async def test_a_wake_is_expected_where_a_node_may_wake_and_none_is_loading(
    served: ServedModels,
) -> None:
    first, second = served.clusters
    assert second.flow.status().wake_s == 0.0  # there is nobody who could
    node = join(first.registry, "d0", NodeRole.DECODE, may_become=["other"])
    assert second.flow.status().wake_s == FIRST_WAKE_S
    assert first.flow.status().wake_s == 0.0
    (told,) = (m for m in served.catalog.status().models if m.name == "other")
    assert told.wake_s == FIRST_WAKE_S
    loading = join(second.registry, "d1", NodeRole.DECODE)
    report(second.registry, loading, NodeRole.DECODE, state=NodeState.LOADING)
    assert second.flow.status().wake_s == 0.0
    second.registry.remove(loading)
    first.registry.remove(node)
    assert second.flow.status().wake_s == 0.0


@pytest.mark.parametrize(("leader", "waited_s"), [("1", 0.0), ("0", FIRST_WAKE_S + FOLLOW_S)])
async def test_each_coordinator_has_what_waits_for_it_woken(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch, leader: str, waited_s: float
) -> None:
    first, second = served.clusters
    clock = served._clock
    assert isinstance(clock, ManualClock)
    node = join(first.registry, "d0", NodeRole.DECODE, may_become=["other"])
    report(first.registry, node, NodeRole.DECODE, leader=leader, num_coordinators=2)
    monkeypatch.setattr(first, "_least", {})
    served.look()
    clock.advance(FIRST_WAKE_S)
    for seconds, orders in ((waited_s - 0.1, []), (waited_s, [Drain(become="other")])):
        waiting = [Waiting("", seconds, 60.0)] if seconds >= 0 else []
        asked = ModelNow("other", {}, [], waiting)
        monkeypatch.setattr(second, "now", partial(replace, asked))
        served.look()
        assert said_to(node) == orders


async def test_a_request_whose_nodes_have_gone_has_its_model_woken(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no line any more; the node that it was lost with comes back as another model's."""
    first, second = served.clusters
    clock = served._clock
    assert isinstance(clock, ManualClock)
    monkeypatch.setattr(first, "_least", {})
    node = join(first.registry, "d0", NodeRole.DECODE, may_become=["other"])
    prefill = join(second.registry, "p0", NodeRole.PREFILL)
    lost = join(second.registry, "d1", NodeRole.DECODE)
    for cluster, member in ((first, node), (second, prefill), (second, lost)):
        report(cluster.registry, member, member.role, leader="1")
    served.look()
    running = second.flow.start(
        GenerationRequest(request_id="r", prompt=Prompt([1, 2, 3]), sampling=SamplingParams())
    )
    clock.advance(FIRST_WAKE_S)
    served.look()
    assert said_to(node) == []
    second.registry.remove(lost)
    assert second.absent.misses(NodeRole.DECODE)
    served.look()
    assert said_to(node) == [Drain(become="other")]
    join(first.registry, "d1", NodeRole.DECODE)
    assert not second.absent.misses(NodeRole.DECODE)
    running.cancel("the test is over")


async def test_who_waits_for_what_no_node_can_become_is_told_so(tmp_path: Path) -> None:
    """As soon as that is known, and whoever comes until it is tried again."""
    make_checkpoint(tmp_path / "same", "llama")
    models = [f"[models.{name}]\nsource = 'same'\nmin = {{}}" for name in ("small", "other")]
    (tmp_path / "m.toml").write_text("\n".join(models))
    config = CoordinatorConfig(models=str(tmp_path / "m.toml"))
    served = served_from(read_all_model_files(config))
    first, second = served.clusters
    assert isinstance(served._clock, ManualClock)

    def ask(request_id: str) -> RunningRequest:
        prompt, sampling = Prompt([1, 2, 3]), SamplingParams()
        request = GenerationRequest(request_id=request_id, prompt=prompt, sampling=sampling)
        return second.flow.start(request)

    waiting = ask("r")
    for life, refused in enumerate(("", "other", "other")):
        assert not waiting.has_ended
        node = join(
            first.registry,
            "d0",
            NodeRole.DECODE,
            incarnation=f"{life}",
            may_become=["other"],
            refused=refused,
        )
        report(first.registry, node, NodeRole.DECODE, leader="1")
        served.look()
        served._clock.advance(FIRST_WAKE_S)
        if life < 2:
            served.look()
            assert said_to(node) == [Drain(become="other")]
            first.registry.remove(node)
    late = ask("s")
    served.look()
    assert waiting.journey.error == late.journey.error == "no_node_available"
    served._clock.advance(PAUSE_S)
    late = ask("t")
    served.look()
    assert said_to(node) == [Drain(become="other")]
    assert not late.has_ended, "it is tried again"
    late.cancel("the test is over")


async def test_who_waits_is_looked_at_as_soon_as_a_node_may_leave(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the next heartbeat."""
    first, second = served.clusters
    clock = served._clock
    assert isinstance(clock, ManualClock)
    node = join(first.registry, "d0", NodeRole.DECODE, may_become=["other"])
    report(first.registry, node, NodeRole.DECODE, leader="1")
    monkeypatch.setattr(first, "_least", {})
    asked = ModelNow("other", {}, [], [Waiting("", 0.1, 60.0)])
    monkeypatch.setattr(second, "now", lambda: asked)
    served.look()
    assert served._look_due_s == clock.now() + FIRST_WAKE_S
    served._load_changed(0, 0, 0)
    assert served._look_due_s > clock.now() + _LOOK_S, "nobody is in a line"
    served._load_changed(1, 0, 1)
    served._load_changed(0, 0, 0)
    assert served._look_due_s == clock.now() + _LOOK_S
    clock.advance(FIRST_WAKE_S)
    async with asyncio.timeout(60.0):
        while said_to(node) != [Drain(become="other")]:
            await asyncio.sleep(_LOOK_S)
    assert served._look_due_s == math.inf


async def test_a_node_on_standby_is_not_taken_for_those_that_are_about_to_come_back(
    served: ServedModels,
) -> None:
    """The coordinator was started again."""
    first, clock = served.clusters[0], served._clock
    assert isinstance(clock, ManualClock)
    waiting = join(first.registry, "w", NodeRole.DECODE, state=NodeState.LOADING)
    report(first.registry, waiting, NodeRole.DECODE, state=NodeState.LOADING, is_standby=True)
    for _ in range(3):
        first.pools.look(1)
        assert said_to(waiting) == []
        clock.advance(0.5)
    clock.advance(SharedTimeouts().liveness_s)
    first.pools.look(1)
    (order,) = said_to(waiting)
    assert isinstance(order, SetRole)


async def test_places_on_nodes_are_bounded_for_all_models_together(served: ServedModels) -> None:
    first, second = served.clusters
    assert first.flow.max_inflight == second.flow.max_inflight == 7
    assert served.of_name("mini") is served.of_name(None) is first
    assert served.of_name("other") is second
    join(second.registry, "d1", NodeRole.DECODE)
    assert served.of_node("d1") is second
    assert [member.node_id for member in served] == ["d1"]


def test_metrics_say_which_model_they_are_of() -> None:
    whole, models = CoordinatorMetrics(), {"a": CoordinatorMetrics(is_whole=False)}
    whole.requests.labels(outcome="model_not_found").inc()
    models["a"].requests.labels(outcome="stop").inc(2)
    text = b"".join(pieces_of_all(whole, models)).decode()
    assert text.count("# TYPE pdserve_requests_total counter") == 1
    assert 'pdserve_requests_total{outcome="model_not_found"} 1.0' in text
    assert 'pdserve_requests_total{model="a",outcome="stop"} 2.0' in text
    assert text.count("\nprocess_start_time_seconds ") == 1
    one = b"".join(pieces_of_all(whole, {}))
    assert one.count(b"model=") == 0


def status_of(name: str, node: NodeStatus, *, waiting: int = 0) -> ClusterStatus:
    return ClusterStatus(
        model=name,
        mode="colocated",
        ready=True,
        inflight=1,
        waiting=waiting,
        waiting_by_class=[WaitingClass("standard", waiting, 1, float(waiting))],
        refused={"ttft": waiting},
        nodes=[node],
    )


def test_the_status_of_all_is_that_of_each() -> None:
    one = status_of("a", node_status("d1", "decode"), waiting=1)
    assert whole_status({"a": one}) is one
    other = status_of("b", node_status("d0", "decode"), waiting=2)
    whole = whole_status({"a": one, "b": other})
    assert [(node.node_id, node.model) for node in whole.nodes] == [("d0", "b"), ("d1", "a")]
    assert (whole.model, whole.inflight, whole.waiting) == ("a, b", 2, 3)
    assert whole.waiting_by_class == [WaitingClass("standard", 3, 2, 2.0)]
    assert whole.refused == {"ttft": 3}
    assert whole.of_model(whole.models[1]).nodes[0].node_id == "d0"


def test_findings_say_which_model_lacks_nodes() -> None:
    one = status_of("a", node_status("d1", "decode"))
    other = status_of("b", node_status("p0", "prefill"))
    found = findings(whole_status({"a": one, "b": other}), 0.0)
    problems = [finding.what for finding in found if finding.level is Level.PROBLEM]
    assert problems == ["b: no decode node is ready (none is attached)"]


def test_what_a_model_of_the_file_lacks_is_told_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[models.a]\nsource = "./nowhere"')
    with pytest.raises(ConfigError, match=r"m.toml: models.a: there is no directory ./nowhere"):
        read_all_model_files(CoordinatorConfig(models=str(file)))
    named = CheckpointConfig(model="x")
    with pytest.raises(ConfigError, match="the file says what is served"):
        read_all_model_files(CoordinatorConfig(models=str(file), checkpoint=named))


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "same", "llama")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    file = tmp_path / "m.toml"
    file.write_text('[models.a]\nsource = "same"\nchat_template = "chat.jinja"')
    (files,) = read_all_model_files(CoordinatorConfig(models=str(file)))
    template = files.text.load().chat_template
    assert template is not None
    assert template.source == "{{ messages[0].content }}!"


async def test_equal_tokenizers_are_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "same", "llama")
    shutil.copytree(tmp_path / "same", tmp_path / "copy")
    shutil.copytree(tmp_path / "same", tmp_path / "changed")
    (tmp_path / "changed/chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}")
    file = "".join(
        f"[models.{name}]\nsource = '{source}'\nchat_template = '{template}'\n"
        for name, source, template in (
            ("a", "same", ""),
            ("b", "copy", ""),
            ("c", "changed", ""),
            ("d", "same", "own.jinja"),
            ("e", "copy", "own.jinja"),
        )
    )
    (tmp_path / "m.toml").write_text(file)
    found = read_all_model_files(CoordinatorConfig(models=str(tmp_path / "m.toml")))
    served = served_from(found)
    a, b, c, d, e = [await served.catalog.find(name).ready() for name in "abcde"]
    assert a.tokenizer is b.tokenizer
    assert d.tokenizer is e.tokenizer
    assert a.grammars is b.grammars
    assert len({a.tokenizer, c.tokenizer, d.tokenizer}) == len(served.texts) == 3


async def test_a_tokenizer_is_loaded_when_its_model_has_a_node_or_is_asked_for(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    async def begin(tokenizer: Tokenizer) -> None:
        begun.append(tokenizer)

    monkeypatch.setattr(Tokenizer, "begin", begin)
    for model in served.catalog:
        assert model.names
        served.catalog.status()
    assert not len(served.texts)
    join(served.clusters[1].registry, "d0", NodeRole.DECODE)
    await asyncio.gather(*served._preparing)
    assert len(served.texts) == 1
    model = await served.catalog.find("small").ready()
    assert begun == [model.tokenizer]
    assert len(served.texts) == 1, "the other one's is equal"
    await served.catalog.close()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "{}", "missing required field `model`"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_damaged_tokenizer_is_told_at_the_start(
    tmp_path: Path, file: str, content: str | None, said: str
) -> None:
    damaged = make_checkpoint(tmp_path / "a", "llama") / file
    damaged.unlink(missing_ok=True)
    if content is not None:
        damaged.write_text(content)
    (tmp_path / "m.toml").write_text('[models.a]\nsource = "a"')
    with pytest.raises(TokenizerError, match=f"m.toml: models.a: .*{said}"):
        read_all_model_files(CoordinatorConfig(models=str(tmp_path / "m.toml")))


async def test_a_tokenizer_that_has_changed_since_is_an_error_of_the_call(
    tmp_path: Path, served: ServedModels
) -> None:
    (tmp_path / "same/chat_template.jinja").write_text("{{ messages }}")
    async with api_of(catalog=served.catalog) as api:
        async with api.chat(model="small") as response:
            told = (await response.json())["error"]
            assert (response.status, told["code"]) == (503, "tokenizer_error")
            assert "'small' cannot be asked now" in told["message"]
            assert str(tmp_path) not in told["message"]
        async with api.client.get("/v1/models") as response:
            assert [one["id"] for one in (await response.json())["data"]] == ["small", "mini"]


def test_a_registered_model_that_is_not_used_costs_half_a_megabyte(tmp_path: Path) -> None:
    """A hundred of them: below 50 MB."""
    make_checkpoint(tmp_path / "same", "llama")
    num = 12
    lines = [f"[models.m{number}]\nsource = 'same'\nmin = {{}}\n" for number in range(num)]
    (tmp_path / "m.toml").write_text("".join(lines))
    found = read_all_model_files(CoordinatorConfig(models=str(tmp_path / "m.toml")))
    tracemalloc.start()
    try:
        served = served_from(found)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(served.clusters) == num
    assert num_bytes / num < 0.5e6
