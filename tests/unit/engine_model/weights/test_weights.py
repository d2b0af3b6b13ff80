"""Loading weights: progress, conversion, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.plan.forms import BFLOAT16, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_decoder
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError
from tests.checkpoints import edit_config, make_checkpoint
from tests.unit.engine_model.harness import load_torch_decoder

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


Load = Callable[..., Decoder]


@pytest.fixture(params=[load_decoder, load_torch_decoder])
def load(request: pytest.FixtureRequest) -> Load:
    """For a CPU, where the first one is native."""

    def load(path: Path, on_progress: Callable[[float], None] | None = None) -> Decoder:
        checkpoint = resolve_checkpoint(str(path))
        config = load_model_config(checkpoint)
        made: Decoder = request.param(
            checkpoint,
            ModelPlan.of(config, form=BFLOAT16),
            ActivationDtype.BFLOAT16,
            CPU,
            on_progress,
        )
        return made

    return load


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_progress_and_conversion(tmp_path: Path, load: Load) -> None:
    path = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB", attention_bias=True)
    shares: list[float] = []
    decoder = load(path, shares.append)
    assert decoder.dtype == torch.bfloat16
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(set(shares)) >= 1 + 2 * 4  # the head; matrices of two layers


def test_a_missing_tensor_is_named(model: Path, load: Load) -> None:
    edit(model, lambda tensors: tensors.pop(UP))
    with pytest.raises(MissingTensor, match=rf"lacks {UP}$"):
        load(model)


def test_experts_in_one_tensor_are_refused_with_the_way_out(tmp_path: Path, load: Load) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe")
    experts = "model.layers.1.mlp.experts."

    def fuse(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(experts)]:
            del tensors[name]
        tensors[f"{experts}gate_up_proj"] = torch.zeros(8, 80, 64)
        tensors[f"{experts}down_proj"] = torch.zeros(8, 64, 40)

    edit(path, fuse)
    with pytest.raises(ModelError, match=r"experts\.down_proj.*save_pretrained does by default"):
        load(path)


def test_missing_head_of_an_untied_model(model: Path, load: Load) -> None:
    edit(model, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(MissingTensor, match=r"lm_head\.weight"):
        load(model)


def test_many_missing_tensors_are_counted(model: Path, load: Load) -> None:
    edit_config(model, num_hidden_layers=3)
    with pytest.raises(MissingTensor, match=r"model\.layers\.2.* and 6 more"):
        load(model)


def test_misshaped_tensor(model: Path, load: Load) -> None:
    edit(model, lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()}))
    with pytest.raises(MisshapedTensor, match=rf"{UP} .*\[95, 64\].*\[96, 64\]"):
        load(model)


def test_unexpected_tensor(model: Path, load: Load) -> None:
    edit(model, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": UP_BIAS}))
    with pytest.raises(ModelError, match=r"q_proj\.bias, which the config"):
        load(model)


UP_BIAS = torch.zeros(64)


def test_tensors_that_follow_from_the_config_are_ignored(model: Path, load: Load) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(model, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(model)


def test_tied_copy_of_the_head(tmp_path: Path, load: Load) -> None:
    path = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(path)


def test_integer_weights(model: Path, load: Load) -> None:
    edit(model, lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    with pytest.raises(ModelError, match=r"int8, and config.* does not say"):
        load(model)


def test_damage_after_the_checkpoint_was_resolved(model: Path) -> None:
    checkpoint = resolve_checkpoint(str(model))
    config = load_model_config(checkpoint)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_decoder(checkpoint, ModelPlan.of(config), ActivationDtype.BFLOAT16, CPU)


def test_no_weights_at_all(model: Path) -> None:
    config = load_model_config(resolve_checkpoint(str(model)))
    nothing = Checkpoint(model / "elsewhere", "model", "")
    nothing.path.mkdir()
    shutil.copy(model / "config.json", nothing.path)
    with pytest.raises(ModelError, match="holds neither"):
        load_decoder(nothing, ModelPlan.of(config), ActivationDtype.BFLOAT16, CPU)
