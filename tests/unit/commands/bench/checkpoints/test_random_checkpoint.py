"""The checkpoint with random weights: whole, the same each time, and it speaks plain text only."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from pdserve.commands.bench.checkpoints.random_checkpoint import (
    kept_checkpoint,
    plain_ids,
    tensor_shapes,
    write_random_checkpoint,
)
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.models.config import load_model_config, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ConfigError
from tests.matrix import matrix

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_checkpoint(tmp_path / "model", shape=TINY)


def test_it_is_a_model_of_that_shape_for_long_prompts(folder: Path) -> None:
    config = load_model_config(resolve_checkpoint(str(folder)))
    assert (config.num_layers, config.hidden_size, config.num_kv_heads) == (2, 16, 1)
    assert config.max_model_len == 8192
    assert not config.ties_embeddings


def test_the_seed_names_it(folder: Path, tmp_path: Path) -> None:
    def revision(path: Path) -> str:
        return resolve_checkpoint(str(path)).revision

    same = write_random_checkpoint(tmp_path / "same", shape=TINY)
    other = write_random_checkpoint(tmp_path / "other", shape=TINY, seed=1)
    assert revision(same) == revision(folder) != revision(other)


def test_weights_are_bfloat16_numbers_around_zero(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 2 * 9 + 3
        down = file.get_tensor("model.layers.1.mlp.down_proj.weight")
        assert down.shape == (16, 24)
        assert str(down.dtype) == "torch.bfloat16"
        values = down.float().numpy()
        assert np.abs(values.mean()) < 0.05
        assert values.std() == pytest.approx(24**-0.5, rel=0.15)
        assert (file.get_tensor("model.norm.weight").float().numpy() == 1).all()


def test_only_plain_text_can_be_said(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spoken = plain_ids(json.loads((folder / "tokenizer.json").read_text()))
    assert len(spoken) > 1000
    for token_id in spoken:
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        assert text
        assert text.isascii()
        assert text.isprintable()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        head = file.get_tensor("lm_head.weight").float().numpy()
    silent = sorted(set(range(len(head))) - set(spoken))
    assert silent
    assert (head[silent] == 0).all()
    assert (np.abs(head[spoken]).sum(axis=1) > 0).all()


def test_the_tokenizer_is_the_demo_models_but_for_the_length(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    demo = json.loads((CHECKPOINT_PATH / "tokenizer_config.json").read_text())
    assert settings == demo | {"model_max_length": 8192}


def test_a_larger_vocabulary_than_the_tokenizers_stays_silent_beyond_it(tmp_path: Path) -> None:
    wide = write_random_checkpoint(tmp_path / "wide", shape=TINY | {"vocab_size": 3000})
    with safe_open(wide / "model.safetensors", framework="pt") as file:
        head = file.get_tensor("lm_head.weight").float()
        assert file.get_tensor("model.embed_tokens.weight")[2048:].abs().sum(dim=1).min() > 0
    assert head.shape == (3000, 16)
    assert not head[2048:].any()


def test_tied_qwen3_speaks_plain_text_only(tmp_path: Path) -> None:
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    folder = write_random_checkpoint(
        tmp_path / "tied", shape=TINY | kind | {"tie_word_embeddings": True}
    )
    config = load_model_config(resolve_checkpoint(str(folder)))
    assert any(norm.is_of_heads for norm in config.norms)
    assert config.ties_embeddings
    spoken = plain_ids(json.loads((folder / "tokenizer.json").read_text()))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  # not a dict
        table = file.get_tensor("model.embed_tokens.weight").float()
    assert set(table.abs().sum(dim=1).nonzero().flatten().tolist()) == set(spoken)


def shapes_in_files(plan: ModelPlan) -> dict[str, tuple[int, ...]]:
    """Those of the plan's tensors, where files have them: parts of one have each row of it once."""
    found, parts = plan.expected(), defaultdict(list)
    for name, place in plan.within().items():
        if (shape := found.pop(name, None)) is not None:
            num_rows, *others = reversed(shape) if place.is_transposed else shape
            shared = [each for each in plan.within().values() if each.name == place.name]
            turn = shared.index(place) * num_rows if place.head_rows else place.first_row
            parts[place.name].append((turn, num_rows, *others))
    for name, of_one in parts.items():
        end = 0
        for first_row, num_rows, *others in sorted(of_one):
            assert (first_row, others) == (end, list(of_one[0][2:])), name
            end += num_rows
        found[name] = (end, *of_one[0][2:])
    return found


@pytest.mark.parametrize("name", matrix(SHAPES, {"demo-14m", "moe-160m", "hybrid-160m"}))
def test_named_shapes_can_be_served(name: str) -> None:
    demo = json.loads((CHECKPOINT_PATH / "config.json").read_text())
    fields = demo | {"tie_word_embeddings": False} | SHAPES[name]
    config = parse_model_config(JsonFields(fields, name))
    shapes = tensor_shapes(fields)
    assert shapes_in_files(ModelPlan.of(config)) == shapes
    linear = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    if not config.ties_embeddings:
        linear -= config.vocab_size * config.hidden_size
    expected = {"160m": 128e6, "0.6b": 596e6, "demo-14m": 13.1e6}
    if name in expected:
        assert linear == pytest.approx(expected[name], rel=0.01)
    groups = {"160m-1-to-1": 1, "160m-8-to-1": 8}
    if name in groups:
        assert config.num_heads == groups[name] * config.num_kv_heads


def test_weights_that_do_not_fit_on_the_disk_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(ConfigError, match=r"141\.1 GB, and there is room for 1\.0 GB"):
        kept_checkpoint(tmp_path, "70b")
    assert list(tmp_path.iterdir()) == []


def test_transformers_reads_it_and_speaks_the_same_tokens(tmp_path: Path) -> None:
    shape = TINY | SHAPES["0.6b"] | TINY | {"vocab_size": 2500}
    folder = write_random_checkpoint(tmp_path / "model", shape=shape)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([[20, 21, 22, 23]])
    with torch.inference_mode():
        said = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert isinstance(model, Qwen3ForCausalLM)
    text = tokenizer.decode(said[0, 4:])
    assert text.isascii()
    assert text.isprintable()
    assert len(text) >= 8
