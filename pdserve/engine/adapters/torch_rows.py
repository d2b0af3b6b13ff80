"""Adapters in plain torch: the weights of a step, in which rows have their own additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.adapters.adapter import Adapter, LowRank
from pdserve.engine.experts import Experts, SharedExpert
from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.plan.matrix import Matrices, Matrix
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.steps.batch import Batch

Rows = Sequence[tuple[Adapter, Tensor]]  # of a step: each adapter, and which rows have it


@dataclass(frozen=True, slots=True)
class Addition:
    """What some rows get besides, in some columns of a product."""

    rows: Tensor  # int64
    columns: slice
    low_rank: LowRank


@dataclass(frozen=True, slots=True)
class AdaptedLinear(Linear):
    """A layer with additions for some rows."""

    additions: tuple[Addition, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        y = Linear.__call__(self, x)
        for addition in self.additions:
            rows, low_rank = addition.rows, addition.low_rank
            own = y[rows, addition.columns].float()
            if low_rank.factors is not None:
                bias = 0.0 if self.bias is None else self.bias[addition.columns].float()
                own = (own - bias) * low_rank.factors.to(own.device) + bias
            made = own + added(x[rows].float(), low_rank)
            y[rows, addition.columns] = made.to(y.dtype)
        return y

    def of_rows(self, rows: Tensor) -> AdaptedLinear:
        """See Linear."""
        own = []
        for addition in self.additions:
            places = torch.isin(rows, addition.rows).nonzero()[:, 0]
            own.append(replace(addition, rows=places))
        return replace(self, additions=tuple(own))


@dataclass(frozen=True, slots=True)
class AdaptedStack(Linear):
    """A stack of layers, with those of each."""

    of_each: tuple[tuple[Addition, ...], ...] = ()

    def __getitem__(self, number: int) -> Linear:
        """See Linear."""
        one = Linear.__getitem__(self, number)
        return AdaptedLinear(one.weight, one.bias, one.scales, self.of_each[number])


def added(x: Tensor, low_rank: LowRank) -> Tensor:
    """[num_rows, in_features] float32 -> [num_rows, out_features] float32."""
    device = x.device
    bias = None if low_rank.bias is None else low_rank.bias.to(device)
    inner = functional.linear(x, low_rank.a.to(device))
    return functional.linear(inner, low_rank.b.to(device), bias)


def rows_of(batch: Batch, adapters: Mapping[str, Adapter]) -> Rows:
    """Say which rows of a step have which adapter."""
    if not batch.adapters:
        return []
    starts = batch.attention.query_start.tolist()
    context_lens = batch.attention.context_lens.tolist()
    rows: dict[str, list[int]] = {}
    for number, digest in enumerate(batch.adapters):
        if digest:
            end = starts[number + 1]
            first = end - (context_lens[number] - batch.adapted_from[number])
            rows.setdefault(digest, []).extend(range(max(starts[number], first), end))
    device = batch.token_ids.device
    return [(adapters[d], torch.tensor(own, device=device).long()) for d, own in rows.items()]


def of_sampled(rows: Rows, batch: Batch) -> Rows:
    """The same of the step's sampled rows, numbered among these."""
    return [(adapter, torch.isin(batch.sampled_rows, own).nonzero()[:, 0]) for adapter, own in rows]


@dataclass(frozen=True, slots=True)
class AdaptedLayers:
    """Makes the layers of a step."""

    plan: ModelPlan
    rows: Rows

    def layer(self, index: int, weights: LayerWeights) -> LayerWeights:
        """Return a layer as the step's rows have it; `index` is that in the plan."""
        if not self.rows:
            return weights
        plan, mlp = self.plan.layers[index], weights.mlp
        matrices = plan.mlp.matrices
        mixer = {name: self._linear(one, plan.mixer[name]) for name, one in weights.mixer.items()}
        heads = {
            name: self._stack(stack, [head[name] for head in plan.heads])
            for name, stack in weights.heads.items()
        }
        weights = replace(weights, mixer=mixer, heads=heads)
        if isinstance(mlp, Mlp):
            return replace(weights, mlp=self._mlp(mlp, matrices, ""))
        shared = mlp.shared
        if shared is not None:
            shared = SharedExpert(
                self._mlp(shared.mlp, matrices, "shared_"),
                shared.weight and self._linear(shared.weight, matrices["shared_weight"]),
            )
        stacks = {
            name: self._stack(stack, [each[name] for each in plan.mlp.experts])
            for name, stack in mlp.stacks.items()
        }
        router = self._linear(mlp.router, matrices["router"])
        experts = Experts(mlp.config, router, **stacks, shared=shared, score_bias=mlp.score_bias)
        return replace(weights, mlp=experts)

    def _mlp(self, mlp: Mlp, matrices: Matrices, kind: str) -> Mlp:
        own = {name: self._linear(one, matrices[kind + name]) for name, one in mlp.linears.items()}
        return Mlp(**own)

    def _linear(self, linear: Linear, matrix: Matrix) -> Linear:
        additions = self._additions(matrix)
        if not additions:
            return linear
        return AdaptedLinear(linear.weight, linear.bias, linear.scales, additions)

    def _stack(self, stack: Linear, matrices: list[Matrix]) -> Linear:
        of_each = tuple(self._additions(matrix) for matrix in matrices)
        return AdaptedStack(stack.weight, stack.bias, stack.scales, of_each)

    def _additions(self, matrix: Matrix) -> tuple[Addition, ...]:
        shard: Shard = self.plan.shard
        return tuple(
            Addition(rows, columns, low_rank)
            for adapter, rows in self.rows
            for columns, low_rank in adapter.of(matrix, shard)
        )
