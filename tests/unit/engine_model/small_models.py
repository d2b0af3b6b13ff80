"""Small decoders with random weights, without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.attention import AttentionBatch
from pdserve.engine.experts import Experts
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.parameters import DecoderWeights, allocate_weights
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.native.weights import NativeWeights
from pdserve.engine.plan.forms import BFLOAT16, FLOAT32, WeightForm
from pdserve.engine.steps.batch import Batch
from pdserve.kv import KvDtype
from tests.native_attention import writing_attention
from tests.packed_weights import pack_weights
from tests.plans import plan_in

CPU = torch.device("cpu")
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
KV_DTYPES = {torch.float32: KvDtype.FLOAT32, torch.bfloat16: KvDtype.BFLOAT16}

_SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class SmallModel:
    """One set of weights, for whichever decoder."""

    config: ModelConfig
    weights: DecoderWeights

    def packed(self, form: WeightForm | None = None) -> NativeWeights:
        form = KINDS[self.weights.embedding.dtype] if form is None else form
        return pack_weights(self.weights, self.config, form)

    def native(self, form: WeightForm | None = None, variant: str = "") -> NativeDecoder:
        return NativeDecoder(self.config, self.packed(form), variant)

    def torch(self) -> TorchDecoder:
        return TorchDecoder(self.config, self.weights, writing_attention(CPU))

    def kv_cache(
        self, num_blocks: int = 64, block_size: int = 16, dtype: KvDtype | None = None
    ) -> KvCache:
        """Of NaN: what a block held before must never matter. A scale is NaN of set bits, too."""
        dtype = dtype or KV_DTYPES[self.weights.embedding.dtype]
        cache = KvCache(self.config.kv_layout(block_size, dtype), num_blocks, CPU)
        cache.pool.view(torch.uint8).fill_(255)
        return cache


def small_config(**fields: Any) -> ModelConfig:
    return parse_model_config(JsonFields(_SMALL | fields, "config.json"))


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> SmallModel:
    """Random weights of the size that training gives them, so that activations are of order 1."""
    config = small_config(**fields)
    weights = allocate_weights(plan_in(config, dtype), dtype, CPU)
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor | None, scale: float, mean: float = 0.0) -> None:
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + mean)

    fill(weights.embedding, 1.0)
    for layer in weights.layers:
        linears = [*layer.mixer.values()]
        if isinstance(layer.mlp, Experts):
            for matrices in (layer.mlp.router, layer.mlp.gate_up, layer.mlp.down):
                fill(matrices.weight, 1.5 * matrices.weight.shape[-1] ** -0.5)
            fill(layer.mlp.score_bias, 0.2)
            if layer.mlp.shared is not None:
                linears += [layer.mlp.shared.mlp.gate_up, layer.mlp.shared.mlp.down]
        else:
            linears += [layer.mlp.gate_up, layer.mlp.down]
        for linear in linears:
            fill(linear.weight, 1.5 * linear.weight.shape[1] ** -0.5)
            fill(linear.bias, 0.2)
        for stack in layer.heads.values():
            fill(stack.weight, 1.5 * stack.weight.shape[-1] ** -0.5)
        for norm in layer.norms.values():
            fill(norm, 0.1, 1.0)
        if layer.qk_norm is not None:
            for heads in layer.qk_norm.split([config.num_heads, config.num_kv_heads]):
                heads.copy_(torch.randn(config.head_dim, generator=generator) * 0.1 + 1.0)
    fill(weights.final_norm, 0.1, 1.0)
    if not config.ties_embeddings:
        fill(weights.lm_head.weight, config.hidden_size**-0.5)
    return SmallModel(config, weights)


@dataclass(frozen=True)
class Part:
    """Tokens [first, last) of a sequence, in a step after that of those before them."""

    token_ids: list[int]
    first: int
    last: int
    blocks: list[int]


def make_batch(parts: list[Part], block_size: int = 16, sampled: list[int] | None = None) -> Batch:
    """A step of several sequences.

    Args:
        parts: one for each sequence.
        block_size: of the pool.
        sampled: rows to sample; None: all.
    """
    counts = [part.last - part.first for part in parts]
    tables = torch.zeros(len(parts), max(len(part.blocks) for part in parts), dtype=torch.int32)
    slots = []
    for row, part in zip(tables, parts, strict=True):
        row[: len(part.blocks)] = torch.tensor(part.blocks)
        slots += [
            part.blocks[position // block_size] * block_size + position % block_size
            for position in range(part.first, part.last)
        ]
    rows = list(range(sum(counts))) if sampled is None else sampled
    return Batch(
        token_ids=torch.tensor([t for p in parts for t in p.token_ids[p.first : p.last]]),
        positions=torch.tensor([t for p in parts for t in range(p.first, p.last)]),
        attention=AttentionBatch(
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor([part.last for part in parts], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.tensor(slots),
        ),
        sampled_rows=torch.tensor(rows, dtype=torch.int64),
        sampled_requests=[],
    )


def random_tokens(num_tokens: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def all_logits(decoder: Decoder, kv_cache: KvCache, token_ids: list[int]) -> Tensor:
    """[num_tokens, vocab_size] of one sequence, computed in one step and in the first blocks."""
    num_blocks = kv_cache.layout.blocks_for(len(token_ids))
    part = Part(token_ids, 0, len(token_ids), list(range(num_blocks)))
    with torch.inference_mode():
        logits = decoder.logits(make_batch([part], kv_cache.layout.block_size), kv_cache.pool)
    assert logits is not None
    return logits.clone()


def make_native(small: SmallModel, **changes: Any) -> _native.Decoder:
    """The C++ decoder itself, with some arguments changed."""
    config = small.config
    arguments = {
        "weights": small.packed(),
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "model_kv_heads": config.num_kv_heads,
        "first_kv_head": 0,
        "vocab_size": config.vocab_size,
        "first_token_id": 0,
        "num_token_ids": config.vocab_size,
        "first_layer": 0,
        "pool_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "is_bfloat16": False,
        "norm_eps": config.rms_norm_eps,
        "sliding_windows": [0] * config.num_layers,
        "inverse_frequencies": torch.ones(2, 1, config.head_dim // 2),
        "rope_scales": [1.0],
        "layer_ropes": [0] * config.num_layers,
        "activation": "silu",
        "attention_scale": 1.0,
        "attention_cap": 0.0,
        "logit_cap": 0.0,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "centres_norms": False,
        "norms_heads_together": False,
        "is_parallel": False,
    }
    return _native.Decoder(**(arguments | changes))
