"""What plans may say beyond what decoders compute today: other forms in torch, and other norms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.families import LayerNorm
from pdserve.engine.models.parameters import allocate_weights
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import INT8, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_decoder
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ModelError
from tests.checkpoints import make_checkpoint
from tests.native_attention import writing_attention
from tests.unit.engine_model.harness import load_torch_decoder
from tests.unit.engine_model.small_models import CPU, all_logits, random_tokens, small_config

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_torch_computes_with_a_scale_for_each_output_as_the_native_decoder(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """As their KV says: the output matrix is not quantised in torch."""
    tied = overrides | {"tie_word_embeddings": False}
    checkpoint = resolve_checkpoint(str(make_checkpoint(tmp_path, family, **tied)))
    plan = ModelPlan.of(load_model_config(checkpoint), form=INT8)
    kv = []
    for load in (load_decoder, load_torch_decoder):
        decoder = load(checkpoint, plan, ActivationDtype.FLOAT32, CPU)
        cache = KvCache(plan.config.kv_layout(16, KvDtype.FLOAT32), 2, CPU)
        all_logits(decoder, cache, random_tokens(20, vocab_size=256))
        kv.append(cache.pool[:, :, :, :, :4])  # of a block's tokens, those that are there
    torch.testing.assert_close(*kv, atol=1e-4, rtol=1e-4)


def test_a_norm_that_a_decoder_does_not_know_is_refused() -> None:
    config = small_config()
    config = replace(config, norms=(*config.norms, LayerNorm("post_norm", "post_norm")))
    weights = allocate_weights(ModelPlan.of(config), torch.bfloat16, CPU)
    with pytest.raises(ModelError, match="layers have post_norm, which is not computed here"):
        TorchDecoder(config, weights, writing_attention(CPU))
