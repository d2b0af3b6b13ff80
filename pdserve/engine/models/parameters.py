"""A decoder's weights in memory, and where each tensor of a checkpoint belongs in them.

The query, key and value projections are one matrix, and so are gate and up: one large product
instead of several small ones. The experts of a layer are one tensor for each purpose. The
checkpoint's tensors are loaded directly into their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.experts import Experts
from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.expert_config import ExpertConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Heads are ordered queries, keys, values."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    attention_out: Linear  # [hidden_size, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden_size]
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, on one device and, but for routers, of one dtype."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]; the embedding itself when tied


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor of the checkpoint belongs."""

    shape: tuple[int, ...]  # required shape in the checkpoint
    destination: Tensor  # the part of the weights that it is copied or broadcast into


def allocate_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Allocate uninitialised memory for a model's weights."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(num_out: int, num_in: int, has_bias: bool) -> Linear:
        return Linear(empty(num_out, num_in), empty(num_out) if has_bias else None)

    def mlp(experts: ExpertConfig | None) -> Mlp | Experts:
        if experts is None:
            inner, has_bias = config.intermediate_size, config.has_mlp_bias
            return Mlp(linear(2 * inner, hidden, has_bias), linear(hidden, inner, has_bias))
        count, inner = experts.num_experts, experts.intermediate_size
        return Experts(
            experts,
            router=torch.empty(count, hidden, device=device),
            gate_up=empty(count, 2 * inner, hidden),
            down=empty(count, hidden, inner),
        )

    hidden, head_dim = config.hidden_size, config.head_dim
    num_qk_heads = config.num_heads + config.num_kv_heads
    num_qkv_heads = num_qk_heads + config.num_kv_heads
    embedding = empty(config.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=[
            LayerWeights(
                attention_norm=empty(hidden),
                qkv=linear(num_qkv_heads * head_dim, hidden, config.has_qkv_bias),
                qk_norm=empty(num_qk_heads, head_dim) if config.has_qk_norm else None,
                attention_out=linear(hidden, config.num_heads * head_dim, config.has_o_bias),
                mlp_norm=empty(hidden),
                mlp=mlp(config.experts_of(index)),
            )
            for index in range(config.num_layers)
        ],
        final_norm=empty(hidden),
        lm_head=embedding if config.ties_embeddings else empty(config.vocab_size, hidden),
    )


def tensor_slots(weights: DecoderWeights, config: ModelConfig) -> dict[str, TensorSlot]:
    """Return tensor name in the checkpoint |-> its slot. Together the slots cover all weights."""
    slots = dict(_slot("model.embed_tokens.weight", weights.embedding))
    for index, layer in enumerate(weights.layers):
        slots.update(_layer_slots(f"model.layers.{index}.", layer, config))
    slots.update(_slot("model.norm.weight", weights.final_norm))
    if not config.ties_embeddings:
        slots.update(_slot("lm_head.weight", weights.lm_head))
    return slots


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return tensor name in the checkpoint |-> its required shape, for all tensors."""
    nowhere = allocate_weights(config, torch.float32, torch.device("meta"))
    return {name: slot.shape for name, slot in tensor_slots(nowhere, config).items()}


_Slots = Iterator[tuple[str, TensorSlot]]


def _layer_slots(prefix: str, layer: LayerWeights, config: ModelConfig) -> _Slots:
    head_dim, num_heads = config.head_dim, config.num_heads
    q_rows, kv_rows = num_heads * head_dim, config.num_kv_heads * head_dim
    attention = prefix + "self_attn."
    yield from _slot(prefix + "input_layernorm.weight", layer.attention_norm)
    yield from _split_slots(
        {
            f"{attention}q_proj": q_rows,
            f"{attention}k_proj": kv_rows,
            f"{attention}v_proj": kv_rows,
        },
        layer.qkv,
    )
    if layer.qk_norm is not None:
        # The checkpoint has one vector for all query heads and one for all key heads. It is
        # broadcast to a row per head, so that one product normalizes both.
        shape = (head_dim,)
        yield attention + "q_norm.weight", TensorSlot(shape, layer.qk_norm[:num_heads])
        yield attention + "k_norm.weight", TensorSlot(shape, layer.qk_norm[num_heads:])
    yield from _split_slots({f"{attention}o_proj": config.hidden_size}, layer.attention_out)
    yield from _slot(prefix + "post_attention_layernorm.weight", layer.mlp_norm)
    if isinstance(layer.mlp, Mlp):
        yield from _mlp_slots(prefix + "mlp.", layer.mlp, config)
    else:
        yield from _expert_slots(prefix, layer.mlp)


def _mlp_slots(mlp: str, weights: Mlp, config: ModelConfig) -> _Slots:
    inner = config.intermediate_size
    yield from _split_slots({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, weights.gate_up)
    yield from _split_slots({f"{mlp}down_proj": config.hidden_size}, weights.down)


def _expert_slots(layer: str, weights: Experts) -> _Slots:
    names = weights.config.names
    yield from _slot(f"{layer}{names.router()}.weight", weights.router)
    for number, (gate_up, out) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
        gate, up, down = names.expert(number)
        for name, matrix in zip((gate, up, down), (*gate_up.chunk(2), out), strict=True):
            yield from _slot(f"{layer}{name}.weight", matrix)


def _slot(name: str, destination: Tensor) -> _Slots:
    yield name, TensorSlot(tuple(destination.shape), destination)


def _split_slots(num_rows: dict[str, int], linear: Linear) -> _Slots:
    """Yield slots for the matrices whose rows, concatenated, make up `linear`."""
    start = 0
    for name, rows in num_rows.items():
        yield from _slot(name + ".weight", linear.weight[start : start + rows])
        if linear.bias is not None:
            yield from _slot(name + ".bias", linear.bias[start : start + rows])
        start += rows
