"""The layers other than attention, in plain torch. Rounds where the reference rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Linear:
    """x · weightᵀ + bias."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear  # the rows of gate, then those of up: [2 * intermediate_size, hidden_size]
    down: Linear  # [hidden_size, intermediate_size]

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate).mul_(up))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows to a root mean square of 1 in float32; multiply by `weight` in x's dtype.

    Args:
        x: [..., size].
        weight: [size], or anything that broadcasts to x.
        eps: added to the mean square.
    """
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
