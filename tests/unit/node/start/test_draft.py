"""The draft model of a node: what it may be, and what it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from pdserve.demo_model import CHECKPOINT_PATH, DRAFT_PATH
from pdserve.engine.drafts.heads.eagle3 import Eagle3Head, HeadPlan
from pdserve.engine.drafts.heads.head import BLOCK_TOKENS
from pdserve.engine.drafts.heads.mtp import MtpHead, MtpPlan
from pdserve.engine.drafts.model.draft_model import DraftModel
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.sizes import packed_bytes
from pdserve.node.memory.draft_share import KV_SHARE
from pdserve.node.start.draft import load_draft, plan_models
from pdserve.node.start.model import NodeModel
from pdserve.settings.config import EngineConfig, NodeConfig, ProfileConfig, WeightsConfig
from pdserve.settings.speculation import SpeculationConfig
from pdserve.shared.errors import ConfigError
from tests.checkpoints import edit_config, make_checkpoint
from tests.fakes.cards import show_cards
from tests.heads import add_mtp, make_eagle3


def config(model: Path | str, served: Path | str = "", **engine: str | int) -> NodeConfig:
    return NodeConfig(
        checkpoint=WeightsConfig(model=str(served)),
        engine=EngineConfig(**({"device": "cpu", "kv_memory": "64MiB"} | engine)),
        speculation=SpeculationConfig(
            model=str(model), sources=["model"] if str(model) else ["text"]
        ),
        profile=ProfileConfig(profile="off"),
    )


def kv_bytes(model: NodeModel) -> int:
    return model.num_blocks * model.layout.block_bytes


def test_the_kv_of_both_models_shares_the_memory() -> None:
    alone, both = plan_models(config("")), plan_models(config(DRAFT_PATH))
    assert alone.draft is None
    assert isinstance(both.draft, NodeModel)
    assert kv_bytes(both.draft) <= kv_bytes(alone) // KV_SHARE
    assert kv_bytes(alone) * 0.99 < kv_bytes(both) + kv_bytes(both.draft) <= kv_bytes(alone)
    assert both.revision == alone.revision
    assert both.layout == alone.layout


def test_it_is_computed_alone_beside_ranks() -> None:
    both = plan_models(config(DRAFT_PATH, tensor_parallel=2, threads=2))
    assert isinstance(both.draft, NodeModel)
    assert both.draft.share.is_alone


def test_it_is_loaded_and_its_costs_are_guessed_by_its_size() -> None:
    settings = config(DRAFT_PATH)
    both = plan_models(settings)
    assert isinstance(both.draft, NodeModel)
    draft = load_draft(both, both.draft, settings, lambda: None)
    assert isinstance(draft, DraftModel)
    sizes = [packed_bytes(model.plan(), model.activations) for model in (both.draft, both)]
    assert draft.perf.costs.knot_s[0] == pytest.approx(0.005 * sizes[0] / sizes[1])
    assert draft.pool.num_free == both.draft.num_blocks
    assert draft.max_model_len == 2048


def test_on_a_gpu_it_has_a_part_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_cards(monkeypatch, [8 << 30])
    on_gpu = {"device": "cuda", "kv_memory": "auto"}
    alone, both = (plan_models(config(named, **on_gpu)) for named in ("", DRAFT_PATH))
    assert isinstance(both.draft, NodeModel)
    assert both.draft.device.type == "cuda"
    own = kv_bytes(both) + kv_bytes(both.draft)
    assert own < kv_bytes(alone) - (1 << 30), "its weights, graphs and largest step are beside"
    fixed = plan_models(config(DRAFT_PATH, device="cuda", kv_memory="64MiB"))
    assert isinstance(fixed.draft, NodeModel)
    assert (60 << 20) < kv_bytes(fixed) + kv_bytes(fixed.draft) <= 64 << 20


def test_a_head_on_a_gpu_computes_as_the_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_cards(monkeypatch, [8 << 30, 8 << 30])
    served, head = make_checkpoint(tmp_path / "model", "llama"), make_eagle3(tmp_path / "head")
    on_gpu = {"device": "cuda", "kv_memory": "auto", "dtype": "bfloat16"}
    alone, both = (plan_models(config(named, served, **on_gpu)) for named in ("", head))
    assert isinstance(both.draft, HeadPlan)
    assert both.tap_layers == both.draft.config.taps == (0, 1, 1)
    assert alone.tap_layers == ()
    assert (both.draft.device, both.draft.dtype) == (both.device, ActivationDtype.BFLOAT16)
    own = both.draft.num_blocks * both.draft.block_bytes
    own += both.draft.config.fixed_bytes(both.draft.dtype)
    assert kv_bytes(alone) * 0.999 < kv_bytes(both) + own <= kv_bytes(alone)
    for parallel in ("tensor_parallel", "pipeline_parallel"):
        ranks = plan_models(config(head, served, **on_gpu, **{parallel: 2}))
        assert isinstance(ranks.draft, HeadPlan), "rank 0 has the rows of all stages"
    hosts = config(head, served, **on_gpu)
    hosts = msgspec.structs.replace(
        hosts, engine=msgspec.structs.replace(hosts.engine, rank_hosts=["10.0.0.2:7000"])
    )
    with pytest.raises(ConfigError, match="no head has the rows of stages on several hosts"):
        plan_models(hosts)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DRAFT_PATH, other)
    file = other / "tokenizer.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps(own | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(ConfigError, match=f"speculation.model {other}: .*other bytes"):
        plan_models(config(other))
    file.write_text(json.dumps(own).replace("<|end|>", "<|fin|>"))
    with pytest.raises(ConfigError, match=r'token 5 is "<\|fin\|>", there it is "<\|end\|>"'):
        plan_models(config(other))


def test_there_is_none_where_nobody_asks_it() -> None:
    asked = config(CHECKPOINT_PATH)
    off = msgspec.structs.replace(
        asked, speculation=SpeculationConfig(mode="off", model=str(DRAFT_PATH))
    )
    assert plan_models(off).draft is None
    demo = plan_models(msgspec.structs.replace(asked, speculation=SpeculationConfig()))
    assert isinstance(demo.draft, NodeModel)
    assert demo.draft.checkpoint.path == DRAFT_PATH
    with pytest.raises(ValueError, match="leaves model out"):
        SpeculationConfig(sources=["text"], model="x")
    with pytest.raises(ValueError, match=r"say which, in speculation\.model"):
        SpeculationConfig(sources=["model"])


def test_an_eagle3_head_is_told_from_a_model_by_its_config(tmp_path: Path) -> None:
    served, head = make_checkpoint(tmp_path / "model", "llama"), make_eagle3(tmp_path / "head")
    settings = config(head, served)
    both = plan_models(settings)
    assert isinstance(both.draft, HeadPlan)
    alone = kv_bytes(plan_models(config("", served)))
    own = both.draft.num_blocks * both.draft.block_bytes
    assert alone // KV_SHARE - both.draft.block_bytes < own <= alone // KV_SHARE
    assert alone * 0.99 < kv_bytes(both) + own <= alone
    assert isinstance(load_draft(both, both.draft, settings, lambda: None), Eagle3Head)
    with pytest.raises(ConfigError, match=f"model {head}: of kv_memory its KV .* raise"):
        plan_models(config(head, served, kv_memory="64KiB", max_model_len=64, block_size=16))
    with pytest.raises(ConfigError, match=f"speculation.model {head}: it is a head of another"):
        plan_models(config(head))
    for parallel in ("tensor_parallel", "pipeline_parallel"):
        ranks = plan_models(config(head, served, **{parallel: 2, "threads": 2}))
        assert isinstance(ranks.draft, HeadPlan), "rank 0 has the rows of all stages"


def test_the_layer_of_a_checkpoint_is_used_where_it_is(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "deepseek_v3")
    with pytest.raises(ConfigError, match="model mtp: the checkpoint has no layer"):
        plan_models(config("mtp", path))
    add_mtp(path)
    asked = msgspec.structs.replace(config("", path), speculation=SpeculationConfig())
    for settings in (asked, config("mtp", path)):
        both = plan_models(settings)
        assert isinstance(both.draft, MtpPlan)
        assert both.draft.kernels
        own = both.draft.num_blocks * both.draft.block_bytes
        assert (64 << 20) * 0.99 < kv_bytes(both) + own <= 64 << 20
        assert both.draft.num_blocks == 64 * both.max_model_len // BLOCK_TOKENS, "of 64 streams"
    assert isinstance(load_draft(both, both.draft, settings, lambda: None), MtpHead)
    ranks = plan_models(config("mtp", path, tensor_parallel=2, threads=2))
    assert isinstance(ranks.draft, MtpPlan), "rank 0 has what it goes on from, and computes it"
    assert plan_models(config("", path)).draft is None, "its sources leave it out"


@pytest.mark.parametrize(("num_stored", "num_named"), [(3, 3), (2, 3)], ids=["all", "some"])
def test_further_layers_are_used_as_far_as_files_have_them(
    tmp_path: Path, num_stored: int, num_named: int
) -> None:
    path = add_mtp(make_checkpoint(tmp_path / "model", "deepseek_v3"), num_layers=num_stored)
    edit_config(path, num_nextn_predict_layers=num_named)
    settings = config("mtp", path)
    both = plan_models(settings)
    assert isinstance(both.draft, MtpPlan)
    assert len(both.draft.layers) == num_stored
    assert both.draft.block_bytes == num_stored * both.draft.layout.block_bytes
    assert kv_bytes(both) + both.draft.num_blocks * both.draft.block_bytes > (64 << 20) * 0.95
    head = load_draft(both, both.draft, settings, lambda: None)
    assert isinstance(head, MtpHead)
    assert head.num_layers == num_stored
