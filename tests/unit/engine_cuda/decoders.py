"""Models with random weights and nodes over them, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.latent import LATENT_NORMS
from pdserve.engine.models.parameters import DecoderWeights, LayerWeights, allocate_weights
from pdserve.kv import KvDtype
from tests.plans import plan_in
from tests.unit.engine_model.harness import Node


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """The same numbers on every device: norms about 1, all else about 0."""
    generator = torch.Generator().manual_seed(0)
    weights = allocate_weights(plan_in(config, dtype), dtype, device)
    for tensor in tensors_of(replace(weights, slots={})):
        # What is one number a channel or head dimension is a norm or a bias.
        values = torch.randn(tensor.shape, generator=generator) * 0.3
        tensor.copy_(values + 1.0 if tensor.ndim == 1 else values)
    return weights


def tensors_of(part: object) -> Iterator[Tensor]:
    """Every tensor, in the order of the fields."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from tensors_of(item)
    elif isinstance(part, LayerWeights):
        norms, mixer = part.norms, dict(part.mixer)  # in the order of their use
        out = mixer.pop("attention_out")
        of_latent = [norms.get(name) for name in LATENT_NORMS] + [*part.heads.values()]
        attention = [
            norms.get("attention_norm"),
            *mixer.values(),
            part.qk_norm,
            out,
            norms.get("sinks"),
            *of_latent,
        ]
        after = [norm for name, norm in norms.items() if name.startswith("after_")]
        yield from tensors_of([*attention, norms.get("mlp_norm"), part.mlp, after])
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))


def make_node(
    model: Decoder, num_blocks: int = 40, block_size: int = 8, kv_dtype: KvDtype | None = None
) -> Node:
    """A pool full of NaN: what a block held before must never matter."""
    dtype = KvDtype.FLOAT32 if model.dtype == torch.float32 else KvDtype.BFLOAT16
    layout = model.config.kv_layout(block_size, kv_dtype or dtype)
    cache = KvCache(layout, num_blocks, model.device)
    cache.pool.view(torch.uint8).fill_(255)
    return Node(model, cache, ModelRunner(model, cache), list(range(num_blocks)))
