"""What is read of an adapter's files, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.config import read_config
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import AdapterRefused
from tests.adapters import edit_adapter, edit_tensors, make_adapter
from tests.checkpoints import make_checkpoint

Q = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "base", "llama")


@pytest.fixture(scope="module")
def plan(base: Path) -> ModelPlan:
    return ModelPlan.of(load_model_config(resolve_checkpoint(str(base))))


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    return make_adapter(tmp_path / "adapter", base)


def test_ranks_and_scales_follow_the_first_pattern_that_matches(tmp_path: Path) -> None:
    fields = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"model.layers.[01].mlp.*": 32, "x_proj": 3},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 4
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 4.0
    assert config.scale_of("model.layers.1.mlp.up_proj") == 4.0
    assert config.scale_of("model.layers.2.mlp.up_proj") == 2.0
    assert config.scale_of("model.layers.2.max_proj") == 2.0, "a name's end begins after a dot"
    edit_adapter(tmp_path, use_rslora=True)
    assert read_config(tmp_path).scale_of("model.layers.2.mlp.up_proj") == 16 / 8**0.5


def test_a_digest_is_of_what_decides_arithmetic(folder: Path, plan: ModelPlan) -> None:
    digest = read_adapter(folder, plan).digest
    assert len(digest) == 32
    edit_adapter(folder, lora_dropout=0.3, base_model_name_or_path="elsewhere")
    assert read_adapter(folder, plan).digest == digest
    edit_adapter(folder, lora_alpha=5)
    other = read_adapter(folder, plan).digest
    assert other != digest
    edit_tensors(folder, **{f"{Q}.lora_A.weight": torch.zeros(4, 64)})
    assert read_adapter(folder, plan).digest not in (digest, other)


def test_scale_and_bias_are_in_what_is_read(tmp_path: Path, base: Path, plan: ModelPlan) -> None:
    once = make_adapter(tmp_path / "once", base, lora_bias=True)
    twice = make_adapter(tmp_path / "twice", base, lora_bias=True, lora_alpha=8)

    def of(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
        part = adapter.parts[f"model.{Q}"]
        assert part.bias is not None
        return part.b, part.bias

    for one, two in zip(of(read_adapter(once, plan)), of(read_adapter(twice, plan)), strict=True):
        assert torch.equal(2 * one, two)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "has the shape"),
        ({"use_dora": True}, "lacks lora_magnitude_vector"),
        ({"alora_invocation_tokens": "then"}, "a list of token ids"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [3]}, "has nothing as model.embed_tokens.token_adapter"),
        ({"trainable_token_indices": [3, 3]}, "a token twice"),
        ({"trainable_token_indices": {"lm_head": [-1]}}, "a list of token ids"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"rank_pattern": {"(": 2}}, "no regex"),
        ({"rank_pattern": {"(q_proj)+": 2}}, "repeat no group"),
        ({"alpha_pattern": {r"a*\.b*\.c*": 2}}, "at most 2 repeats"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_bias": True}, "lacks lora_B.bias"),
    ],
)
def test_a_config_is_refused_by_its_field(
    fields: dict[str, Any], said: str, folder: Path, plan: ModelPlan
) -> None:
    edit_adapter(folder, **fields)
    with pytest.raises(AdapterRefused, match=said.replace("(", r"\(")) as refused:
        read_adapter(folder, plan)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("end", "tensor", "said"),
    [
        (f"{Q}.lora_A.weight", None, f"lacks lora_A.weight of model.{Q}"),
        (f"{Q}.lora_B.weight", torch.zeros(63, 4), r"\[63, 4\]"),
        (f"{Q}.lora_A.weight", torch.full((4, 64), float("nan")), "NaN"),
        (f"{Q}.lora_A.weight", torch.zeros(4, 64, dtype=torch.int8), "type torch.int8"),
    ],
)
def test_a_tensor_is_refused_by_its_name(
    end: str, tensor: torch.Tensor | None, said: str, folder: Path, plan: ModelPlan
) -> None:
    edit_tensors(folder, **{end: tensor})
    with pytest.raises(AdapterRefused, match=said):
        read_adapter(folder, plan)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("model.layers.0.input_layernorm.weight", (64,)),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", (4, 64)),
        ("model.embed_tokens.weight", (300, 64)),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 64)),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(
    name: str, size: tuple[int, ...], tmp_path: Path, base: Path, plan: ModelPlan
) -> None:
    own = {f"base_model.model.{name}": torch.zeros(size)}
    folder = make_adapter(tmp_path / "adapter", base, own=own)
    with pytest.raises(AdapterRefused, match=name.removesuffix(".weight").split(".lora_A")[0]):
        read_adapter(folder, plan)


def test_trained_tokens_are_those_of_the_model_and_nothing_else_of_the_vocabulary(
    tmp_path: Path, base: Path, plan: ModelPlan
) -> None:
    rows = {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.ones(1, 64)}
    far = make_adapter(tmp_path / "far", base, own=rows, trainable_token_indices={"lm_head": [320]})
    with pytest.raises(AdapterRefused, match="trains token 320, but the model has 320"):
        read_adapter(far, plan)
    rows["base_model.model.lm_head.weight"] = torch.ones(320, 64)
    both = make_adapter(tmp_path / "both", base, own=rows, trainable_token_indices={"lm_head": [3]})
    with pytest.raises(AdapterRefused, match="both trains tokens of lm_head and adapts it"):
        read_adapter(both, plan)


def test_dora_is_served_where_its_config_says_so_and_nothing_is_zero(
    tmp_path: Path, base: Path, plan: ModelPlan
) -> None:
    folder = make_adapter(tmp_path / "adapter", base, modules=("q_proj",), use_dora=True)
    with pytest.raises(AdapterRefused, match="needs the model's own weights"):
        read_adapter(folder, plan)
    checkpoint = resolve_checkpoint(str(base))
    adapter = read_adapter(folder, plan, checkpoint=checkpoint)
    zeros = shutil.copytree(base, tmp_path / "zeros")
    weights = load_file(base / "model.safetensors")
    weights[f"model.{Q}.weight"][5] = 0
    save_file(weights, zeros / "model.safetensors")
    edit_tensors(folder, **{f"{Q}.lora_B.weight": torch.zeros(64, 4)})
    with pytest.raises(AdapterRefused, match="a merged row of zeros"):
        read_adapter(folder, plan, checkpoint=resolve_checkpoint(str(zeros)))
    edit_adapter(folder, use_dora=False)
    with pytest.raises(AdapterRefused, match="lora_magnitude_vector of model"):
        read_adapter(folder, plan, checkpoint=checkpoint)
    assert adapter.parts[f"model.{Q}"].factors is not None


def test_files_that_are_damaged_or_too_large_are_refused(folder: Path, plan: ModelPlan) -> None:
    with pytest.raises(AdapterRefused, match="it may have 10"):
        read_adapter(folder, plan, max_bytes=10)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(AdapterRefused, match="damaged"):
        read_adapter(folder, plan)
    weights.rename(folder / "adapter_model.bin")  # as PEFT once wrote it
    with pytest.raises(AdapterRefused, match=r"has no adapter_model.safetensors: load it in PEFT"):
        read_adapter(folder, plan)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterRefused, match="no JSON object"):
        read_adapter(folder, plan)
