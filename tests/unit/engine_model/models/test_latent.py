"""Latent attention and grouped experts (DeepSeek V2, V3), against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ModelError
from tests.checkpoints import edit_config, make_checkpoint, with_plain_tensors
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.harness import EACH_DECODER, DecoderKind, Node, make_prompt
from tests.unit.engine_model.latent_models import LATENT, LATENT_MUTANTS, Mutant, rotating
from tests.unit.engine_model.reference import assert_matches


def choosing(**changes: Any) -> Mutant:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.experts is not None
        choice = replace(config.experts.choice, **changes)
        return replace(config, experts=replace(config.experts, choice=choice))

    return change


def with_unnormalised_weights(config: ModelConfig) -> ModelConfig:
    assert config.experts is not None
    return replace(config, experts=replace(config.experts, normalizes_weights=False))


MUTANTS: dict[str, tuple[str, Mutant]] = {
    **LATENT_MUTANTS,
    "neighbours rotated, not halves": ("v3 by halves", rotating(is_interleaved=True)),
    "one group": ("v3", choosing(num_groups=1, num_chosen_groups=1)),
    "one group of V2": ("v2", choosing(num_groups=1, num_chosen_groups=1)),
    "groups by their best expert": ("v3", choosing(best_of_group=1)),
    "groups by their best two": ("v2", choosing(best_of_group=2)),
    "no routed scaling factor": ("v3", choosing(weight_scale=1.0)),
    "weights that do not add up to 1": ("v3", with_unnormalised_weights),
}


@EACH_DECODER
@pytest.mark.parametrize("case", matrix(LATENT, 3))
def test_matches_transformers(
    case: str, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    family, overrides = LATENT[case]
    assert_matches(checkpoint_of(family, **overrides), kind)


@pytest.mark.parametrize("mutant", matrix(MUTANTS, 4))
def test_what_is_special_matters(
    mutant: str, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    """Else the tests above would not tell whether it is there."""
    case, change = MUTANTS[mutant]
    family, overrides = LATENT[case]
    path = checkpoint_of(family, **overrides)
    prompt = make_prompt(60)
    right, wrong = (Node.load(path, kind, change=each).logits(prompt) for each in (None, change))
    assert (right - wrong).abs().mean() > 1e-3, "50 times what a match may be off"


def test_the_bias_of_scores_matters(
    kind: DecoderKind, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint_of("deepseek_v3")
    without = with_plain_tensors(path, tmp_path / "changed", "e_score_correction_bias", 0.0)
    prompt = make_prompt(60)
    right, wrong = (Node.load(each, kind).logits(prompt) for each in (path, without))
    assert (right - wrong).abs().mean() > 1e-3


@pytest.mark.parametrize("kv_dtype", [KvDtype.BFLOAT16, KvDtype.INT8])
def test_chunks_and_batches_change_no_bit(
    kv_dtype: KvDtype, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    """Prompts are computed as decode steps are: absorbed, from the pool as it is stored."""
    path = checkpoint_of("deepseek_v3")
    prompts = [make_prompt(length, seed=length) for length in (70, 33, 5)]
    outputs = []
    for chunk in (10**6, 7):
        node = Node.load(path, kind, dtype=KvDtype.BFLOAT16, kv_dtype=kv_dtype)
        requests = [make_request(prompt) for prompt in prompts]
        for batch in [requests] if chunk > 7 else [[request] for request in requests]:
            node.generate(batch, 12, chunk)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]


def test_a_token_takes_one_row_a_layer(checkpoint_of: Callable[..., Path]) -> None:
    config = load_model_config(resolve_checkpoint(str(checkpoint_of("deepseek_v3"))))
    layout = config.kv_layout(16, KvDtype.BFLOAT16)
    assert [plane.name for plane in layout.planes] == ["latent"]
    assert layout.token_bytes == 2 * (52 + 12) * 2
    assert [part.heads for part in layout.parts(2, 1)] == [range(1)] * 2, "all ranks have it"


def test_layers_that_predict_further_tokens_are_left_out(
    kind: DecoderKind, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    edit_config(tmp_path, num_nextn_predict_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    further = {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | further, file)
    prompt = make_prompt(20)
    plain = Node.load(checkpoint_of("deepseek_v3"), kind).logits(prompt)
    assert torch.equal(Node.load(tmp_path, kind).logits(prompt), plain)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"holds model\.layers\.2\.eh_proj\.weight"):
        Node.load(tmp_path, kind)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "n_group is 3; it must be a divisor of 8"),
        ({"topk_group": 5}, "topk_group is 5; it must be at most 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; it must be at most 4"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be 4"),
        ({"qk_rope_head_dim": 11}, "qk_rope_head_dim is 11; it must be even"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be sigmoid"),
        ({"index_topk": 2048}, "index_topk = 2048 is not supported"),
    ],
)
def test_what_contradicts_itself_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    edit_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        load_model_config(resolve_checkpoint(str(tmp_path)))


def test_what_auto_map_names_is_computed_here(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    edit_config(
        tmp_path, auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    )
    assert load_model_config(resolve_checkpoint(str(tmp_path))).latent is not None
