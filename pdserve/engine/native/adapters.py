"""An adapter in the form that the CPU kernels need (csrc/decoder/adapters): packed, A with A."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.adapters.adapter import Adapter, LowRank
from pdserve.engine.native.linear import PANEL_OUTPUTS, PackedLinear, pack
from pdserve.engine.plan.forms import FLOAT32, FORMS, WeightForm
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.plan.model import ModelPlan

_RANK_UNIT: Final = 8  # so that every A's results begin at a multiple of 16 bytes
_WIDE: Final = ("router", "shared_weight")  # whose results are float32 in all models


@dataclass(frozen=True, slots=True)
class NativeAddition:
    """What is added to the products of one matrix."""

    a: PackedLinear  # [ranks of all pieces, num_in]
    # B [columns, ranks] with its bias, the first of A's rows that it reads, the first column
    pieces: list[tuple[PackedLinear, int, int]]


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
        None if adapter.head is None else _packed([(0, adapter.head)], form),
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
    half = matrix.num_out // 2
    padded = -(-half // PANEL_OUTPUTS) * PANEL_OUTPUTS

    def column(row: int) -> int:
        return padded + row - half if matrix.is_gated and row >= half else row

    own = [(column(rows.start), each) for rows, each in adapter.of(matrix, plan.shard)]
    return _packed(own, form) if own else None


def _packed(own: Iterable[tuple[int, LowRank]], form: WeightForm) -> NativeAddition:
    """Pack low-rank matrices, each with its first column, of which some may share A."""
    dtype = torch.float32 if form is FLOAT32 else torch.bfloat16
    first_ranks: dict[int, int] = {}  # of each A, by its memory
    every_a: list[Tensor] = []
    pieces = []
    for first_column, each in own:
        if (key := each.a.data_ptr()) not in first_ranks:
            first_ranks[key] = sum(map(len, every_a))
            every_a.append(_padded(each.a, 0))
        b = pack(_padded(each.b, 1).to(dtype), each.bias, form=form)
        pieces.append((b, first_ranks[key], first_column))
    return NativeAddition(pack(torch.cat(every_a).to(dtype), form=form), pieces)


def _padded(matrix: Tensor, dim: int) -> Tensor:
    """Pad the ranks of A or B with zeros."""
    more = -matrix.shape[dim] % _RANK_UNIT
    return functional.pad(matrix, (0, more) if dim == 1 else (0, 0, 0, more))
