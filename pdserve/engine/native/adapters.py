"""An adapter in the form that the CPU kernels need (csrc/decoder/adapters): packed, A with A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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


@dataclass(slots=True)
class NativeAdapter:
    """All of an adapter that a rank has."""

    additions: list[tuple[int, int, str, NativeAddition]]  # layer, expert or head or -1, name
    head: NativeAddition | None = None
    own_head: PackedLinear | None = None
    own_embedding: Tensor | None = None  # [vocab_size, hidden_size]
    embedding_a: Tensor | None = None  # [vocab_size, ranks]
    embedding_b: PackedLinear | None = None  # [hidden_size, ranks], times embedded tokens' scale
    trained_embedding: tuple[list[int], Tensor] | None = None  # token ids, [ids, hidden_size]
    trained_head: tuple[list[int], PackedLinear] | None = None  # likewise; those of this rank


def native_adapter(
    adapter: Adapter, plan: ModelPlan, dtype: torch.dtype, embedding_scale: float
) -> NativeAdapter:
    """Pack an adapter.

    Args:
        adapter: verified against the model.
        plan: of this rank.
        dtype: of activations.
        embedding_scale: of embedded tokens.
    """
    form = FORMS[str(dtype).removeprefix("torch.")]
    additions = []
    for index, layer in enumerate(plan.layers):
        groups = [
            (-1, layer.matrices),
            *enumerate(layer.mlp.experts),
            *enumerate(layer.heads),
        ]
        for expert, matrices in groups:
            for name, matrix in matrices.items():
                own = FLOAT32 if name in _WIDE else form
                if (made := _addition(adapter, plan, matrix, own)) is not None:
                    additions.append((index, expert, name, made))
    whole = NativeAdapter(additions)
    if plan.shard.is_first_stage:
        _embed(whole, adapter, form, embedding_scale)
    if plan.shard.is_last_stage:
        _score(whole, adapter, form, plan.shard.share(plan.config.vocab_size))
    return whole


def _embed(made: NativeAdapter, adapter: Adapter, form: WeightForm, scale: float) -> None:
    dtype, embedding, trained = (
        torch_dtype(form.dtype),
        adapter.embedding,
        adapter.trained_embedding,
    )
    if adapter.own_embedding is not None:
        made.own_embedding = adapter.own_embedding.to(dtype).contiguous()
    if embedding is not None:
        made.embedding_a = _padded(embedding.a.T, 1).to(dtype).contiguous()
        made.embedding_b = pack(_padded(embedding.b * scale, 1).to(dtype), form=form)
    if trained is not None:
        made.trained_embedding = list(trained.ids), trained.rows.to(dtype).contiguous()


def _score(made: NativeAdapter, adapter: Adapter, form: WeightForm, tokens: slice) -> None:
    """Of the output matrix, a rank has the rows of some tokens."""
    dtype, head, num_out = torch_dtype(form.dtype), adapter.head, tokens.stop - tokens.start
    if head is not None:
        own = LowRank(head.a, head.b[tokens], None if head.bias is None else head.bias[tokens])
        made.head = _packed([(slice(num_out), own)], num_out, form, is_gated=False)
    if adapter.own_head is not None:
        made.own_head = pack(adapter.own_head[tokens].to(dtype), form=form)
    if adapter.trained_head is not None and (trained := adapter.trained_head.within(tokens)).ids:
        made.trained_head = list(trained.ids), pack(trained.rows.to(dtype), form=form)


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
    num_lanes = packed_size(form, num_out, num_ranks, is_gated=is_gated).num_lanes
    pieces = [
        (rows.start or 0, rows.stop, starts[each.a.data_ptr()], each.b.shape[1])
        for rows, each in own
    ]
    layout = _layout(num_out, num_lanes, num_ranks, tuple(pieces), is_gated)
    whole = torch.zeros(num_lanes, layout.width, dtype=dtype)
    bias = factors = None
    for (begin, end, _, rank), places, (_, each) in zip(pieces, layout.places, own, strict=True):
        lanes, b = layout.lanes[begin:end], each.b.to(dtype)
        for column, rows in places:
            columns = whole[:, column : column + rank]
            columns.index_copy_(0, lanes[rows], b[rows])
        if each.bias is not None:
            bias = torch.zeros(num_lanes) if bias is None else bias
            bias[lanes] = each.bias
        if each.factors is not None:
            factors = torch.ones(num_lanes) if factors is None else factors
            factors[lanes] = each.factors
    return NativeAddition(
        pack(torch.cat(every_a).to(dtype), form=form),
        pack(whole, bias, form=form),
        layout.first_ranks,
        factors,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the rows of a matrix are, and which ranks its panels read: as in all layers alike."""

    lanes: Tensor  # [num_out] int64
    first_ranks: Tensor  # [panels] int32, as in a NativeAddition
    width: int  # ranks that a panel reads
    # Of each piece: rows of it, and in which column of what their panels read its ranks begin.
    places: tuple[tuple[tuple[int, Tensor | slice], ...], ...]


@lru_cache(maxsize=64)
def _layout(
    num_out: int,
    num_lanes: int,
    num_ranks: int,
    pieces: tuple[tuple[int, int, int, int], ...],
    is_gated: bool,
) -> _Layout:
    """`pieces`: begin and end of rows, the first of their ranks, and how many they have."""
    lanes, num_panels = lanes_of_rows(num_out, is_gated=is_gated), num_lanes // PANEL_OUTPUTS
    firsts, ends = torch.full((num_panels,), num_ranks), torch.zeros(num_panels, dtype=torch.int64)
    for begin, end, first, rank in pieces:
        panels = torch.unique(lanes[begin:end] // PANEL_OUTPUTS)
        firsts[panels] = firsts[panels].clamp(max=first)
        ends[panels] = ends[panels].clamp(min=first + rank + -rank % _RANK_UNIT)
    width = int((ends - firsts).max())
    # A panel with fewer ranks reads others besides, whose columns are zeros.
    starts_read = torch.where(ends > 0, firsts.clamp(max=num_ranks - width), 0)
    places: list[tuple[tuple[int, Tensor | slice], ...]] = []
    for begin, end, first, _ in pieces:
        columns = first - starts_read[lanes[begin:end] // PANEL_OUTPUTS]
        every = sorted({*columns.tolist()})
        if len(every) == 1:  # unless a panel has rows of several pieces
            places.append(((every[0], slice(None)),))
        else:
            places.append(tuple((c, (columns == c).nonzero()[:, 0]) for c in every))
    first_ranks = torch.where(ends > 0, starts_read, -1).to(torch.int32)
    return _Layout(lanes, first_ranks, width, tuple(places))


def _padded(matrix: Tensor, dim: int) -> Tensor:
    """Pad the ranks of A or B with zeros."""
    more = -matrix.shape[dim] % _RANK_UNIT
    if not more:
        return matrix
    return functional.pad(matrix, (0, more) if dim == 1 else (0, 0, 0, more))
