"""A mixture of experts in plain torch: which experts a token has, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.layers import Gated, Linear, Mlp, gated_silu
from pdserve.engine.models.expert_config import Choice, ExpertConfig, Scoring

LEAST_SUM: Final = 1e-20  # added to sums of sigmoids that weights are divided by


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """One that all tokens have."""

    mlp: Mlp
    weight: Linear | None  # [1, hidden_size] float32, of a sigmoid; None: it is not weighed

    def __call__(self, x: Tensor, gated: Callable[[Tensor], Tensor] = gated_silu) -> Tensor:
        """[num_tokens, hidden_size] -> the same, float32; `gated` as gated_silu."""
        if self.weight is None:
            return self.mlp(x, gated).float()
        return self.weight(x.float()).sigmoid() * self.mlp(x, gated)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer."""

    config: ExpertConfig
    router: Linear  # [num_experts, hidden_size] float32
    gate_up: Linear  # [num_experts, 2 * intermediate_size, hidden_size]: gate, then up
    down: Linear  # [num_experts, hidden_size, intermediate_size]
    shared: SharedExpert | None = None
    score_bias: Tensor | None = None  # [num_experts] float32

    @property
    def stacks(self) -> dict[str, Linear]:
        """Those of all experts, by the names of the plan."""
        return {"gate_up": self.gate_up, "down": self.down}

    def __call__(self, x: Tensor, gated: Gated = gated_silu) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        routing = choose_experts(x, self.router, self.config, self.score_bias)
        mixed = _mixed(x, self, routing, gated)
        return (mixed if self.shared is None else mixed + self.shared(x, gated)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, the best one first."""

    experts: Tensor  # [num_tokens, num_chosen] int64
    weights: Tensor  # [num_tokens, num_chosen] float32


def choose_experts(
    x: Tensor, router: Linear, config: ExpertConfig, score_bias: Tensor | None = None
) -> Routing:
    """Score the tokens [num_tokens, hidden_size] in float32; of equals the first is chosen.

    Waits for no GPU.
    """
    choice = config.choice
    scores = router(x.float())
    if choice.scoring is Scoring.SIGMOID:
        scores = scores.sigmoid()
    compared = scores if score_bias is None else scores + score_bias
    if choice.num_groups > 1:
        compared = _of_best_groups(compared, choice)
    ordered, order = compared.sort(dim=-1, descending=True, stable=True)
    experts = order[:, : config.num_chosen]
    # What is sorted already is not gathered: each is a launch of every layer on a GPU.
    best = ordered[:, : config.num_chosen] if compared is scores else scores.gather(1, experts)
    if choice.scoring is Scoring.SOFTMAX:
        whole = best if config.normalizes_weights else scores
        weights = (best - whole.logsumexp(dim=-1, keepdim=True)).exp()
    elif config.normalizes_weights:
        weights = best / (best.sum(dim=-1, keepdim=True) + LEAST_SUM)
    else:
        weights = best
    return Routing(experts, weights if choice.weight_scale == 1 else weights * choice.weight_scale)


def _of_best_groups(scores: Tensor, choice: Choice) -> Tensor:
    """Return the scores [num_tokens, num_experts]; those of all but the best groups are -inf."""
    groups = scores.view(len(scores), choice.num_groups, -1)
    of_groups = groups.topk(choice.best_of_group, dim=-1).values.sum(dim=-1)
    order = of_groups.sort(dim=-1, descending=True, stable=True).indices
    hidden = torch.ones_like(of_groups, dtype=torch.bool)
    hidden.scatter_(1, order[:, : choice.num_chosen_groups], 0)
    return groups.masked_fill(hidden[:, :, None], -torch.inf).view_as(scores)


def _mixed(x: Tensor, layer: Experts, routing: Routing, gated: Gated) -> Tensor:
    """Return the weighted sums in float32, added in the experts' order."""
    mixed = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(layer.config.num_experts):
        rows, places = torch.where(routing.experts == expert)
        gate_up, down = (stack[expert].of_rows(rows) for stack in (layer.gate_up, layer.down))
        made = Mlp(gate_up, down)(x[rows], gated)
        mixed.index_add_(0, rows, made * routing.weights[rows, places, None])
    return mixed
