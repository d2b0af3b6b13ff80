"""A decoder's weights in memory, and where each tensor of a checkpoint belongs in them.

The query, key and value projections are one matrix, and so are gate and up: one large product
instead of several small ones. The experts of a layer are one tensor for each purpose. The
checkpoint's tensors are loaded directly into their rows.

A tensor-parallel rank has its own heads, inner channels and tokens only. The results of
`attention_out` and of MLPs are added up over the ranks, so only rank 0 has their bias. A pipeline
stage has its own layers only, and tokens only where the model begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.experts import Experts
from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.expert_config import ExpertConfig
from pdserve.engine.ranks.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Heads are ordered queries, keys, values. Numbers of them are this rank's."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    attention_out: Linear  # [hidden_size, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden_size]
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One rank's weights of a decoder, on one device and, but for routers, of one dtype."""

    embedding: Tensor  # [vocab_size, hidden_size]; [0, hidden_size] if not of the first stage
    layers: list[LayerWeights]  # of the stage
    final_norm: Tensor  # [hidden_size]; [0] if not of the last stage
    lm_head: Tensor  # as embedding, of the last stage; if that is the first, too, itself when tied


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor of the checkpoint belongs."""

    shape: tuple[int, ...]  # required shape in the checkpoint
    destination: Tensor  # the part of the weights that it is copied or broadcast into
    part: tuple[slice, ...] = ()  # of the tensor, that this rank has; (): all of it


def allocate_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> DecoderWeights:
    """Allocate uninitialised memory for one rank's weights of a model."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(num_out: int, num_in: int, has_bias: bool) -> Linear:
        return Linear(empty(num_out, num_in), empty(num_out) if has_bias else None)

    def mlp(experts: ExpertConfig | None) -> Mlp | Experts:
        if experts is None:
            inner, has_bias = own.intermediate_size, config.has_mlp_bias
            return Mlp(
                linear(2 * inner, hidden, has_bias), linear(hidden, inner, has_bias and is_first)
            )
        count, inner = experts.num_experts, experts.intermediate_size
        return Experts(
            experts,
            router=torch.empty(count, hidden, device=device),
            gate_up=empty(count, 2 * inner, hidden),
            down=empty(count, hidden, inner),
        )

    own, is_first = shard.of(config), shard.rank == 0
    hidden, head_dim = config.hidden_size, config.head_dim
    num_qk_heads = own.num_heads + own.num_kv_heads
    num_qkv_heads = num_qk_heads + own.num_kv_heads
    tokens = shard.share(config.vocab_size)
    num_tokens = tokens.stop - tokens.start
    embedding = empty(num_tokens if shard.is_first_stage else 0, hidden)
    is_shared = config.ties_embeddings and shard.is_first_stage and shard.is_last_stage
    return DecoderWeights(
        embedding=embedding,
        layers=[
            LayerWeights(
                attention_norm=empty(hidden),
                qkv=linear(num_qkv_heads * head_dim, hidden, config.has_qkv_bias),
                qk_norm=empty(num_qk_heads, head_dim) if config.has_qk_norm else None,
                attention_out=linear(
                    hidden, own.num_heads * head_dim, config.has_o_bias and is_first
                ),
                mlp_norm=empty(hidden),
                mlp=mlp(own.experts_of(index)),
            )
            for index in shard.layers(config)
        ],
        final_norm=empty(hidden if shard.is_last_stage else 0),
        lm_head=embedding if is_shared else empty(num_tokens if shard.is_last_stage else 0, hidden),
    )


def tensor_slots(
    weights: DecoderWeights, config: ModelConfig, shard: Shard = WHOLE
) -> dict[str, TensorSlot]:
    """Return tensor name in the checkpoint |-> its slot. Together the slots cover all weights.

    Args:
        weights: of this rank.
        config: of the whole model.
        shard: the rank.
    """
    tokens = _Cut(config.vocab_size, shard.share(config.vocab_size))
    slots: dict[str, TensorSlot] = {}
    if shard.is_first_stage:
        slots.update(_row_slot(_EMBEDDING, weights.embedding, tokens))
    for index, layer in zip(shard.layers(config), weights.layers, strict=True):
        slots.update(_layer_slots(index, layer, config, shard))
    if shard.is_last_stage:
        slots.update(_slot("model.norm.weight", weights.final_norm))
        head = _EMBEDDING if config.ties_embeddings else "lm_head.weight"
        slots.update(_row_slot(head, weights.lm_head, tokens))
    return slots


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return tensor name in the checkpoint |-> its required shape, for all tensors."""
    nowhere = allocate_weights(config, torch.float32, torch.device("meta"))
    return {name: slot.shape for name, slot in tensor_slots(nowhere, config).items()}


_EMBEDDING: Final = "model.embed_tokens.weight"
_Slots = Iterator[tuple[str, TensorSlot]]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which rows or columns of a matrix in the checkpoint a rank has."""

    total: int  # in the checkpoint
    own: slice

    @property
    def size(self) -> int:
        return int(self.own.stop - self.own.start)

    @classmethod
    def of_heads(cls, total: int, own: slice, head_dim: int) -> _Cut:
        return cls(total * head_dim, slice(own.start * head_dim, own.stop * head_dim))


def _layer_slots(index: int, layer: LayerWeights, config: ModelConfig, shard: Shard) -> _Slots:
    prefix = f"model.layers.{index}."
    head_dim, own_heads = config.head_dim, shard.share(config.num_heads)
    queries = _Cut.of_heads(config.num_heads, own_heads, head_dim)
    keys = _Cut.of_heads(config.num_kv_heads, shard.kv_heads(config), head_dim)
    attention = prefix + "self_attn."
    yield from _slot(prefix + "input_layernorm.weight", layer.attention_norm)
    yield from _row_slots(
        {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys},
        layer.qkv,
    )
    if layer.qk_norm is not None:
        # The checkpoint has one vector for all query heads and one for all key heads. It is
        # broadcast to a row per head, so that one product normalizes both.
        shape, num_heads = (head_dim,), own_heads.stop - own_heads.start
        yield attention + "q_norm.weight", TensorSlot(shape, layer.qk_norm[:num_heads])
        yield attention + "k_norm.weight", TensorSlot(shape, layer.qk_norm[num_heads:])
    yield from _column_slots(f"{attention}o_proj", layer.attention_out, queries)
    yield from _slot(prefix + "post_attention_layernorm.weight", layer.mlp_norm)
    experts = config.experts_of(index)
    total = config.intermediate_size if experts is None else experts.intermediate_size
    inner = _Cut(total, shard.share(total))
    if isinstance(layer.mlp, Mlp):
        yield from _mlp_slots(prefix + "mlp.", layer.mlp, inner)
    else:
        yield from _expert_slots(prefix, layer.mlp, inner)


def _mlp_slots(mlp: str, weights: Mlp, inner: _Cut) -> _Slots:
    yield from _row_slots({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, weights.gate_up)
    yield from _column_slots(f"{mlp}down_proj", weights.down, inner)


def _expert_slots(layer: str, weights: Experts, inner: _Cut) -> _Slots:
    """Each rank has a share of the width of every expert, and all of the router."""
    names = weights.config.names
    yield from _slot(f"{layer}{names.router()}.weight", weights.router)
    for number, (gate_up, out) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
        gate, up, down = names.expert(number)
        for name, rows in zip((gate, up), gate_up.chunk(2), strict=True):
            yield from _row_slot(f"{layer}{name}.weight", rows, inner)
        yield from _column_slots(f"{layer}{down}", Linear(out, None), inner)


def _slot(name: str, destination: Tensor) -> _Slots:
    yield name, TensorSlot(tuple(destination.shape), destination)


def _row_slot(name: str, destination: Tensor, rows: _Cut) -> _Slots:
    yield name, TensorSlot((rows.total, *destination.shape[1:]), destination, (rows.own,))


def _row_slots(parts: dict[str, _Cut], linear: Linear) -> _Slots:
    """Yield slots for the matrices of whose rows, concatenated, `linear` consists."""
    start = 0
    for name, rows in parts.items():
        end = start + rows.size
        yield from _row_slot(name + ".weight", linear.weight[start:end], rows)
        if linear.bias is not None:
            yield from _row_slot(name + ".bias", linear.bias[start:end], rows)
        start = end


def _column_slots(name: str, linear: Linear, columns: _Cut) -> _Slots:
    shape = (len(linear.weight), columns.total)
    yield name + ".weight", TensorSlot(shape, linear.weight, (slice(None), columns.own))
    if linear.bias is not None:
        yield from _slot(name + ".bias", linear.bias)
