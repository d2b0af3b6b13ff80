"""Weights that are no numbers are found at the start, wherever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.commands.cli import inspect_model
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.native.packed_folder import packed_files
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.finite import check_finite
from pdserve.engine.weights.load import load_decoder, load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ModelError
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix

PLACES = [
    ("model.embed_tokens.weight", "row 7"),
    ("model.layers.1.self_attn.k_proj.weight", "row 7"),
    ("model.layers.0.self_attn.q_proj.bias", "element 7"),
    ("model.layers.1.post_attention_layernorm.weight", "element 7"),
    ("lm_head.weight", "row 7"),
]


def spoil(path: Path, name: str, value: float) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(len(tensors[name]), -1)[7, -1] = value
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(("name", "where"), PLACES)
@pytest.mark.parametrize("stored", matrix([torch.float32, torch.bfloat16, torch.float16], 1))
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_one_value_is_enough(
    tmp_path: Path, name: str, where: str, stored: torch.dtype, value: float
) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", dtype=stored, attention_bias=True)
    spoil(path, name, value)
    checkpoint = resolve_checkpoint(str(path))
    plan, cpu = ModelPlan.of(load_model_config(checkpoint)), torch.device("cpu")
    cache = PackedCache(tmp_path / "cache", 1 << 30, wait_s=30.0)
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"{name} holds a NaN or an infinity in {where}"):
            load_decoder(checkpoint, plan, ActivationDtype.BFLOAT16, cpu, cache=cache)
        assert not packed_files(cache.folder), "what is damaged is not kept"
    with pytest.raises(ModelError, match=f"{name} .* {where}"):
        load_torch_weights(checkpoint, plan, ActivationDtype.BFLOAT16, cpu)


def test_norms_and_biases_are_looked_at_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So `pdserve inspect` finds them, too."""
    path = make_checkpoint(tmp_path / "m", "llama", num_hidden_layers=1)
    spoil(path, "model.norm.weight", float("nan"))
    checkpoint = resolve_checkpoint(str(path))
    plan, cpu = ModelPlan.of(load_model_config(checkpoint)), torch.device("cpu")

    def fail(share: float) -> None:
        raise AssertionError(f"{share} of it was loaded")

    with pytest.raises(
        ModelError, match=r"model\.norm\.weight holds a NaN .* in element 7"
    ) as info:
        load_torch_weights(checkpoint, plan, ActivationDtype.FLOAT32, cpu, fail)
    assert inspect_model.run(str(path), None) == 1
    assert f"no: {info.value}" in capsys.readouterr().out


def test_large_values_are_numbers() -> None:
    largest = torch.finfo(torch.bfloat16).max
    check_finite({"w": torch.full((3, 5), largest, dtype=torch.bfloat16)})
    check_finite({"b": torch.full((3,), torch.finfo(torch.float32).max)})
    check_finite({})
