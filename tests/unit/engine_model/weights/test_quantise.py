"""Weights rounded to 4 bits at load: the error, beside a library's, and what is made of a model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.packed_identity import packed_name
from pdserve.engine.plan.forms import BFLOAT16, INT4, INT8, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.weights.codings import native_plan
from pdserve.engine.weights.load import load_decoder
from pdserve.engine.weights.quantise import quantised
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.unit.engine_model.small_models import CPU, all_logits, random_tokens

assert INT4.coding is not None
CODING = INT4.coding


def decoded(weight: Tensor) -> Tensor:
    return torch.from_numpy(quantised(weight, CODING).decoded())


def error(found: Tensor, weight: Tensor) -> float:
    return float((found - weight).square().sum() / weight.square().sum())


def random_weights(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 512, generator=generator) * 0.03
    return weight * weight.abs() * 20 if kind == "heavy tails" else weight


@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_the_error_is_less_than_that_of_a_library(kind: str, name: str) -> None:
    """gguf's, whose Q4_1 has more bits: 5 a weight."""
    weight, type_ = random_weights(kind), gguf.GGMLQuantizationType[name]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), type_), type_)
    assert error(decoded(weight), weight) < 0.97 * error(torch.from_numpy(theirs), weight)


def test_codes_do_not_depend_on_the_rows_beside_them() -> None:
    weight = random_weights("heavy tails")
    whole = quantised(weight, CODING)
    for first in (0, 17):
        part = quantised(weight[first : first + 3], CODING)
        assert np.array_equal(part.codes, whole.codes[first : first + 3])
        assert np.array_equal(part.scales, whole.scales[first : first + 3])


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0, 1e-30])
def test_equal_weights_are_kept(value: float) -> None:
    weight = torch.full((2, 64), value)
    torch.testing.assert_close(decoded(weight), weight, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("other", [0.0, -1.0])
def test_two_values_are_exact(other: float) -> None:
    weight = torch.tensor([other, 1.0]).repeat(2, 32)
    torch.testing.assert_close(decoded(weight), weight, rtol=1e-3, atol=1e-3)


def test_matrices_have_4_bits_where_groups_fit_and_the_head_8(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, "llama", intermediate_size=112)
    checkpoint = resolve_checkpoint(str(made))
    config = load_model_config(checkpoint)
    plan = native_plan(checkpoint, config, INT4)
    found = {matrix.name.rpartition(".")[2]: matrix.form for matrix in plan.matrices}
    assert found == {
        "qkv": INT4,
        "attention_out": INT4,
        "gate_up": INT4,
        "down": INT8,  # 112 inputs are not whole groups
        "lm_head": INT8,
    }
    assert plan.coded == {}, "as it is not stored so"
    assert packed_name(checkpoint, plan, torch.bfloat16).endswith("-bfloat16-int4")
    assert ModelPlan.of(config, Shard(1, 2), INT4).matrices[3].form is INT8


def test_a_model_of_4_bits_computes_nearly_what_it_did(tmp_path: Path) -> None:
    checkpoint = resolve_checkpoint(str(make_checkpoint(tmp_path, "llama")))
    config, logits = load_model_config(checkpoint), {}
    for form, dtype in [
        (BFLOAT16, ActivationDtype.BFLOAT16),
        (INT4, ActivationDtype.BFLOAT16),
        (INT4, ActivationDtype.FLOAT32),
    ]:
        decoder = load_decoder(checkpoint, ModelPlan.of(config, form=form), dtype, CPU)
        cache = KvCache(config.kv_layout(16, KvDtype(dtype)), 3, CPU)
        logits[form, dtype] = all_logits(decoder, cache, random_tokens(40, vocab_size=256))
    plain, integers, floats = logits.values()
    scale = plain.std()
    assert (integers - floats).std() < 0.1 * scale, "activations of 8 bits"
    assert 0.01 * scale < (floats - plain).std() < 0.8 * scale
