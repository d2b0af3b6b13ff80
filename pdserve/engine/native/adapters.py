"""An adapter in the form that the CPU kernels need (csrc/decoder/adapters): packed, A with A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.adapters.adapter import Adapter, LowRank
from pdserve.engine.layers import torch_dtype
from pdserve.engine.native.linear import (
    PANEL_OUTPUTS,
    PackedLinear,
    lanes_of_rows,
    pack,
    packed_size,
)
from pdserve.engine.plan.forms import FLOAT32, FORMS, WeightForm
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.plan.model import ModelPlan

_RANK_UNIT: Final = 8  # so that every A's results begin at a multiple of 16 bytes
_WIDE: Final = ("router", "shared_weight")  # whose results are float32 in all models


@dataclass(frozen=True, slots=True)
class NativeAddition:
    """What is added to the products of one matrix. Each of its panels reads some ranks."""

    a: PackedLinear  # [ranks of all parts, num_in]
    b: PackedLinear  # [lanes of the matrix, most ranks of a panel], with its bias
    first_ranks: Tensor  # [panels] int32: of A's rows, that a panel reads; -1: it gets nothing
    factors: Tensor | None  # [lanes of the matrix], of what that gives


@dataclass(frozen=True, slots=True)
class NativeAdapter:
    """All of an adapter."""

    additions: list[tuple[int, int, str, NativeAddition]]  # layer, expert or -1, name of a matrix
    head: NativeAddition | None
    own_head: PackedLinear | None
    own_embedding: Tensor | None  # [vocab_size, hidden_size]
    embedding_a: Tensor | None  # [vocab_size, ranks]
    embedding_b: PackedLinear | None  # [hidden_size, ranks], times the scale of embedded tokens


def native_adapter(
    adapter: Adapter, plan: ModelPlan, dtype: torch.dtype, embedding_scale: float
) -> NativeAdapter:
    """Pack an adapter.

    Args:
        adapter: verified against the model.
        plan: of the whole model.
        dtype: of activations.
        embedding_scale: of embedded tokens.
    """
    form = FORMS[str(dtype).removeprefix("torch.")]
    additions = []
    for index, layer in enumerate(plan.layers):
        groups = [(-1, layer.matrices), *enumerate(layer.mlp.experts)]
        for expert, matrices in groups:
            for name, matrix in matrices.items():
                own = FLOAT32 if name in _WIDE else form
                if (made := _addition(adapter, plan, matrix, own)) is not None:
                    additions.append((index, expert, name, made))
    embedding = adapter.embedding
    return NativeAdapter(
        additions,
        None
        if adapter.head is None
        else _packed(
            [(slice(plan.config.vocab_size), adapter.head)],
            plan.config.vocab_size,
            form,
            is_gated=False,
        ),
        None if adapter.own_head is None else pack(adapter.own_head.to(dtype), form=form),
        None if adapter.own_embedding is None else adapter.own_embedding.to(dtype).contiguous(),
        None if embedding is None else _padded(embedding.a.T, 1).to(dtype).contiguous(),
        None
        if embedding is None
        else pack(_padded(embedding.b * embedding_scale, 1).to(dtype), form=form),
    )


def _addition(
    adapter: Adapter, plan: ModelPlan, matrix: Matrix, form: WeightForm
) -> NativeAddition | None:
    own = list(adapter.of(matrix, plan.shard))
    return _packed(own, matrix.num_out, form, is_gated=matrix.is_gated) if own else None


def _packed(
    own: Sequence[tuple[slice, LowRank]], num_out: int, form: WeightForm, *, is_gated: bool
) -> NativeAddition:
    """Pack low-rank matrices, each with its rows of the matrix, of which some may share A."""
    dtype = torch_dtype(form.dtype)
    starts: dict[int, int] = {}  # of the ranks of each A, by its memory
    every_a: list[Tensor] = []
    for _, each in own:
        if each.a.data_ptr() not in starts:
            starts[each.a.data_ptr()] = sum(map(len, every_a))
            every_a.append(_padded(each.a, 0))
    num_ranks = sum(map(len, every_a))
    lanes = lanes_of_rows(num_out, is_gated=is_gated)
    num_lanes = packed_size(form, num_out, num_ranks, is_gated=is_gated).num_lanes
    num_panels = num_lanes // PANEL_OUTPUTS
    firsts, ends = torch.full((num_panels,), num_ranks), torch.zeros(num_panels, dtype=torch.int64)
    whole, bias = torch.zeros(num_lanes, num_ranks), torch.zeros(num_lanes)
    factors = torch.ones(num_lanes)
    for rows, each in own:
        first, rank = starts[each.a.data_ptr()], each.b.shape[1]
        whole[lanes[rows], first : first + rank] = each.b
        if each.bias is not None:
            bias[lanes[rows]] = each.bias
        if each.factors is not None:
            factors[lanes[rows]] = each.factors
        panels = torch.unique(lanes[rows] // PANEL_OUTPUTS)
        firsts[panels] = firsts[panels].clamp(max=first)
        ends[panels] = ends[panels].clamp(min=first + rank + -rank % _RANK_UNIT)
    width = int((ends - firsts).max())
    # A panel with fewer ranks reads others besides, whose columns are zeros.
    starts_read = torch.where(ends > 0, firsts.clamp(max=num_ranks - width), 0)
    columns = starts_read.repeat_interleave(PANEL_OUTPUTS)[:, None] + torch.arange(width)
    has_bias = any(each.bias is not None for _, each in own)
    return NativeAddition(
        pack(torch.cat(every_a).to(dtype), form=form),
        pack(whole.gather(1, columns).to(dtype), bias if has_bias else None, form=form),
        torch.where(ends > 0, starts_read, -1).to(torch.int32),
        factors if any(each.factors is not None for _, each in own) else None,
    )


def _padded(matrix: Tensor, dim: int) -> Tensor:
    """Pad the ranks of A or B with zeros."""
    more = -matrix.shape[dim] % _RANK_UNIT
    return functional.pad(matrix, (0, more) if dim == 1 else (0, 0, 0, more))
