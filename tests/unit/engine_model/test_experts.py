"""Mixtures of experts: which experts a row has, and that it has nothing of others' rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.experts import Experts, choose_experts
from pdserve.engine.layers import Linear
from pdserve.engine.models.expert_config import Choice, Scoring
from tests.unit.engine_model.small_models import (
    Part,
    SmallModel,
    all_logits,
    make_batch,
    make_native,
    random_tokens,
    small_model,
)

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 1,
}


def experts_of(small: SmallModel) -> Experts:
    (layer,) = small.weights.layers
    assert isinstance(layer.mlp, Experts)
    return layer.mlp


@pytest.fixture
def small() -> SmallModel:
    return small_model(**FIELDS)


def native_logits(small: SmallModel, num_tokens: int = 40) -> Tensor:
    return all_logits(small.native(), small.kv_cache(), random_tokens(num_tokens))


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
def test_of_equal_experts_the_first_are_chosen(small: SmallModel, is_native: bool) -> None:
    def logits() -> Tensor:
        decoder = small.native() if is_native else small.torch()
        return all_logits(decoder, small.kv_cache(), random_tokens(40))

    experts = experts_of(small)
    experts.router.weight.zero_()
    chosen = choose_experts(torch.randn(5, 64), experts.router, experts.config).experts
    assert torch.equal(chosen, torch.tensor([0, 1]).expand(5, 2))
    before = logits()
    experts.down.weight[2:] = 7.0
    assert torch.equal(logits(), before)
    experts.down.weight[1] = 7.0
    assert not torch.equal(logits(), before)


@pytest.mark.parametrize("normalizes", [False, True])
def test_weights_of_the_chosen(normalizes: bool) -> None:
    config = experts_of(small_model(**FIELDS, norm_topk_prob=normalizes)).config
    router = Linear(torch.randn(6, 64) * 0.3, torch.randn(6))
    x = torch.randn(5, 64)
    shares = router(x).softmax(dim=-1).topk(2)
    routing = choose_experts(x, router, config)
    expected = shares.values / (shares.values.sum(dim=-1, keepdim=True) if normalizes else 1.0)
    assert torch.equal(routing.experts, shares.indices)
    torch.testing.assert_close(routing.weights, expected)


def test_scores_may_be_far_apart(small: SmallModel) -> None:
    """So far that all but the best have the weight 0."""
    experts_of(small).router.weight.mul_(1e4)
    found, expected = (
        native_logits(small),
        all_logits(small.torch(), small.kv_cache(), random_tokens(40)),
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_are_not_numbers_are_nobody_else_s(small: SmallModel) -> None:
    """The pool is NaN where nothing was written: a sequence whose beginning is missing is, too."""
    sound = Part(random_tokens(30), 0, 30, [0, 1])
    broken = Part(random_tokens(30, seed=1), 16, 30, [2, 3])
    native = small.native()
    alone = native.logits(make_batch([sound]), small.kv_cache().pool)
    assert alone is not None
    alone = alone.clone()
    together = native.logits(make_batch([sound, broken]), small.kv_cache().pool)
    assert together is not None
    assert torch.equal(together[:30], alone)
    assert together[30:].isnan().all()


def test_experts_that_contradict_each_other_are_refused(small: SmallModel) -> None:
    packed = small.packed()
    layer = packed.layers[0]
    assert layer.experts is not None
    narrow = small_model(**FIELDS | {"moe_intermediate_size": 24}).packed().layers[0].experts
    assert narrow is not None
    mlps, router = layer.experts.matrices, {"router": layer.experts.matrices[0]["down"]}
    mixed = [*mlps[:-1], narrow.matrices[0]]
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"num_chosen": 0}, r"layers\[0\]\.num_chosen: expected 1 to 6 experts, found 0"),
        ({}, {"num_chosen": 7}, "num_chosen: expected 1 to 6"),
        ({}, {"matrices": mlps[:-1]}, r"layers\[0\]\.router: expected a plain matrix of 5 x 64"),
        ({}, {"matrices": mixed}, r"experts\[5\]\.down: expected one of 40 inputs"),
        (router, {}, r"layers\[0\]\.router: expected a plain matrix of 6 x 64"),
    ]
    for changed, change, message in changes:
        experts = dataclasses.replace(layer.experts, **change)
        matrices = layer.matrices | changed
        layers = [dataclasses.replace(layer, experts=experts, matrices=matrices)]
        with pytest.raises(ValueError, match=message):
            make_native(small, weights=dataclasses.replace(packed, layers=layers))


def test_a_bias_of_scores_is_in_the_choice_and_not_in_the_weights() -> None:
    small = small_model(**FIELDS)
    choice = Choice(Scoring.SIGMOID, has_score_bias=True, weight_scale=2.0)
    config = dataclasses.replace(
        experts_of(small).config, choice=choice, normalizes_weights=True, num_chosen=2
    )
    router, x = torch.randn(6, 64) * 0.3, torch.randn(5, 64)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, 7.0])
    routing = choose_experts(x, Linear(router, None), config, bias)
    assert torch.equal(routing.experts, torch.tensor([5, 3]).expand(5, 2))
    scores = (x @ router.T).sigmoid()[:, [5, 3]]
    torch.testing.assert_close(routing.weights, 2.0 * scores / scores.sum(dim=1, keepdim=True))
