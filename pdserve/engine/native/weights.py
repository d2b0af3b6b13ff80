"""All weights of a decoder, in the form that the CPU kernels need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.native.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class NativeMlp:
    """The MLP of a layer, or one of its experts."""

    gate_up: PackedLinear  # [2 * intermediate_size, hidden_size], gated
    down: PackedLinear  # [hidden_size, intermediate_size]


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """A mixture of experts."""

    router: PackedLinear  # [num_experts, hidden_size], float32
    mlps: list[NativeMlp]  # of each expert, all of one size
    num_chosen: int  # of the experts, for each token
    normalizes_weights: bool  # those of the chosen ones add up to 1


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer: with an MLP or with experts. Heads are ordered queries, keys, values."""

    attention_norm: Tensor  # [hidden_size] float32
    qkv: PackedLinear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    q_norm: Tensor | None  # [head_dim] float32
    k_norm: Tensor | None  # [head_dim] float32
    attention_out: PackedLinear  # [hidden_size, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden_size] float32
    mlp: NativeMlp | None
    experts: NativeExperts | None


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """All weights that the decoder reads: of the model, or of a rank's share of it."""

    dtype: torch.dtype  # of activations
    embedding: Tensor | None  # [vocab_size, hidden_size], as in the checkpoint; in the first stage
    layers: list[NativeLayer]
    final_norm: Tensor | None  # [hidden_size] float32; in the last stage, as lm_head
    lm_head: PackedLinear | None  # [vocab_size, hidden_size]
