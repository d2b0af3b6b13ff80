"""The native decoder against float64: its errors are those that its roundings explain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.plan.forms import BFLOAT16, FP8, INT8, WeightForm
from tests.kernels.cases import EACH_VARIANT
from tests.matrix import examples, matrix
from tests.unit.engine_model.native.exact import ExactDecoder, to_bfloat16
from tests.unit.engine_model.small_models import all_logits, random_tokens, small_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "attention_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    # Where all experts are chosen, rounding changes no choice.
    "qwen3 moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}
CHOOSY: dict[str, Any] = {  # in float32 it changes none in these tokens either
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
}


def error_of(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, relative to what is told apart."""
    return float((found.double() - exact).square().mean().sqrt() / exact.std())


@pytest.mark.parametrize("fields", [*MODELS.values(), CHOOSY], ids=[*MODELS, "mixtral"])
def test_float32_logits_are_as_exact_as_float32_can_be(fields: dict[str, Any]) -> None:
    small = small_model(**fields)
    tokens = random_tokens(150)
    exact = ExactDecoder(small.config, small.packed()).logits(tokens)
    assert error_of(all_logits(small.native(), small.kv_cache(), tokens), exact) < 2e-6


@pytest.mark.parametrize("form", matrix([BFLOAT16, INT8, FP8], 1))
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_is_off_by_what_rounding_predicts(model: str, form: WeightForm) -> None:
    small = small_model(torch.bfloat16, num_hidden_layers=4, **MODELS[model])
    tokens = random_tokens(150)
    packed = small.packed(form)
    exact = ExactDecoder(small.config, packed).logits(tokens)
    predicted = error_of(ExactDecoder(small.config, packed, to_bfloat16).logits(tokens), exact)
    found = error_of(all_logits(small.native(form), small.kv_cache(), tokens), exact)
    assert 1e-3 < predicted < 5e-2, "or nothing is compared"
    assert found < 1.15 * predicted


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_is_better_than_torch(model: str) -> None:
    """Since the residual stream is not rounded."""
    small = small_model(torch.bfloat16, num_hidden_layers=4, **MODELS[model])
    tokens = random_tokens(150)
    exact = ExactDecoder(small.config, small.packed()).logits(tokens)
    native = error_of(all_logits(small.native(), small.kv_cache(), tokens), exact)
    torch_error = error_of(all_logits(small.torch(), small.kv_cache(), tokens), exact)
    assert native < torch_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_change_little(dtype: torch.dtype) -> None:
    small = small_model(dtype)
    tokens = random_tokens(100)
    exact = ExactDecoder(small.config, small.packed()).logits(tokens)
    found = all_logits(small.native(INT8), small.kv_cache(), tokens)
    # A weight is off by up to 1 / 254 of its row's largest, which is three times the usual one:
    # by 0.7 % of the usual one in the mean. Some ten products of sums follow each other.
    assert 1e-3 < error_of(found, exact) < 4e-2


@pytest.mark.parametrize("variant", EACH_VARIANT)
@settings(max_examples=examples(15))
@given(
    hidden_size=st.integers(1, 90),
    intermediate_size=st.integers(1, 90),
    head_dim=st.sampled_from([2, 6, 16, 20, 64]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    num_tokens=st.integers(1, 70),
    seed=st.integers(0, 3),
)
def test_odd_sizes(
    variant: str,
    hidden_size: int,
    intermediate_size: int,
    head_dim: int,
    heads: tuple[int, int],
    num_tokens: int,
    seed: int,
) -> None:
    small = small_model(
        seed=seed,
        vocab_size=37,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        head_dim=head_dim,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    tokens = random_tokens(num_tokens, seed, vocab_size=37)
    exact = ExactDecoder(small.config, small.packed()).logits(tokens)
    found = all_logits(small.native(variant=variant), small.kv_cache(), tokens)
    # Where a norm divides by next to nothing, float32 is as far off as it is in torch.
    reference = all_logits(small.torch(), small.kv_cache(), tokens).double()
    unavoidable = (reference - exact).abs().amax(dim=1, keepdim=True)
    allowed = 1e-4 * (1 + exact.abs()) + 10 * unavoidable
    assert ((found.double() - exact).abs() <= allowed).all()
