"""All weights of a decoder, in the form that the CPU kernels need, by the names of its plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdserve.engine.models.expert_config import SOFTMAX, Choice
from pdserve.engine.native.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """A mixture of experts."""

    matrices: list[dict[str, PackedLinear]]  # of each expert, all of one size
    num_chosen: int  # of the experts, for each token
    normalizes_weights: bool  # those of the chosen ones add up to 1
    choice: Choice = SOFTMAX
    score_bias: Tensor | None = None  # [number of experts] float32


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer: what there is of it, csrc/decoder/model.h says by name and size."""

    norms: dict[str, Tensor]  # float32
    matrices: dict[str, PackedLinear]  # all but those of experts and heads
    experts: NativeExperts | None
    heads: list[dict[str, PackedLinear]] = field(default_factory=list)  # of latent attention


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """All weights that the decoder reads: of the model, or of a rank's share of it."""

    dtype: torch.dtype  # of activations
    # [vocab_size, hidden_size], of `dtype` or coded; in the first stage
    embedding: Tensor | PackedLinear | None
    layers: list[NativeLayer]
    final_norm: Tensor | None  # [hidden_size] float32; in the last stage, as lm_head
    lm_head: PackedLinear | None  # [vocab_size, hidden_size]
