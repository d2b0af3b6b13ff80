"""The checkpoint with random weights: whole, the same each time, and it speaks plain text only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from pdserve.bench.random_checkpoint import plain_ids, write_random_checkpoint
from pdserve.checkpoint import resolve_checkpoint
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.models.config import load_model_config

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
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
