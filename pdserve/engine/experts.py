"""A mixture of experts in plain torch: which experts a token has, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.layers import Gated, Linear, Mlp, gated_silu
from pdserve.engine.models.expert_config import ExpertConfig


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """One that all tokens have, weighed by a sigmoid."""

    mlp: Mlp
    weight: Linear  # [1, hidden_size] float32

    def __call__(self, x: Tensor, gated: Callable[[Tensor], Tensor] = gated_silu) -> Tensor:
        """[num_tokens, hidden_size] -> the same, float32; `gated` as gated_silu."""
        return self.weight(x.float()).sigmoid() * self.mlp(x, gated)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer."""

    config: ExpertConfig
    router: Linear  # [num_experts, hidden_size] float32
    gate_up: Linear  # [num_experts, 2 * intermediate_size, hidden_size]: gate, then up
    down: Linear  # [num_experts, hidden_size, intermediate_size]
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, gated: Gated = gated_silu) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        mixed = _mixed(x, self, choose_experts(x, self.router, self.config), gated)
        return (mixed if self.shared is None else mixed + self.shared(x, gated)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, the best one first."""

    experts: Tensor  # [num_tokens, num_chosen] int64
    weights: Tensor  # [num_tokens, num_chosen] float32


def choose_experts(x: Tensor, router: Linear, config: ExpertConfig) -> Routing:
    """Score the tokens [num_tokens, hidden_size] in float32; of equals the first is chosen.

    Waits for no GPU.
    """
    scores = router(x.float())
    best, experts = scores.sort(dim=-1, descending=True, stable=True)
    best, experts = best[:, : config.num_chosen], experts[:, : config.num_chosen]
    whole = best if config.normalizes_weights else scores
    return Routing(experts, (best - whole.logsumexp(dim=-1, keepdim=True)).exp())


def _mixed(x: Tensor, layer: Experts, routing: Routing, gated: Gated) -> Tensor:
    """Return the weighted sums in float32, added in the experts' order."""
    mixed = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(layer.config.num_experts):
        rows, places = torch.where(routing.experts == expert)
        gate_up, down = (stack[expert].of_rows(rows) for stack in (layer.gate_up, layer.down))
        made = Mlp(gate_up, down)(x[rows], gated)
        mixed.index_add_(0, rows, made * routing.weights[rows, places, None])
    return mixed
