"""Loads a checkpoint into the weights of the native decoder: packed once, then mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.native.linear import PackedLinear, empty_packed, pack_codes, pack_rows
from pdserve.engine.native.packed_cache import Arrays, PackedCache, packed_arrays
from pdserve.engine.native.packed_identity import packed_identity, packed_name
from pdserve.engine.native.weights import NativeExperts, NativeLayer, NativeWeights
from pdserve.engine.plan.layer import LayerPlan
from pdserve.engine.plan.matrix import Matrices, Matrix, Part
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.finite import check_codes, check_finite, check_scales
from pdserve.engine.weights.opening import open_tensors
from pdserve.engine.weights.stored.tensors import CodedTensor, StoredTensor
from pdserve.model_files.checkpoint import Checkpoint

Progress = Callable[[float], None]  # called with the loaded share, from 0 to 1
Tensors = Mapping[str, Tensor]
Stored = Mapping[str, StoredTensor]

_PIECE_BYTES: Final = 64 << 20  # as float32: so much is decoded at a time


def load_native_weights(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    dtype: torch.dtype,
    cache: PackedCache | None,
    on_progress: Progress,
) -> NativeWeights:
    """Load the weights of a checkpoint, from the cache if they are there.

    Args:
        checkpoint: the checkpoint to load.
        plan: of a rank; of the files, only its share is read.
        dtype: of activations, and of the embedding.
        cache: where packed weights are kept; None packs them into memory.
        on_progress: called after each matrix, from this thread; may raise to abort loading.

    Raises:
        ModelError: as open_tensors; or a value is not finite.
    """
    tensors = open_tensors(
        checkpoint,
        plan.expected(),
        ignored=plan.ignored(),
        within=plan.within(),
    )
    arrays = packed_arrays(
        cache,
        packed_name(checkpoint, plan, dtype),
        packed_identity(checkpoint, plan, dtype),
        lambda: _arrays(plan, dtype, tensors, on_progress),
        lambda: on_progress(0.0),
    )
    on_progress(1.0)
    final_norm, lm_head = plan.final_norm, plan.lm_head
    return NativeWeights(
        dtype=dtype,
        embedding=_looked_up(plan, arrays, tensors),
        layers=[_layer(layer, arrays) for layer in plan.layers],
        final_norm=None if final_norm is None else arrays[final_norm.tensor],
        lm_head=None if lm_head is None else PackedLinear.of(lm_head, arrays),
    )


def _looked_up(plan: ModelPlan, arrays: Tensors, tensors: Stored) -> Tensor | PackedLinear | None:
    """Return the embedding."""
    if plan.table is not None:
        return PackedLinear.of(plan.table, arrays)
    if (part := plan.embedding) is None:
        return None
    rows = arrays.get(part.weight)
    return tensors[part.weight][part.cut] if rows is None else rows


def _arrays(plan: ModelPlan, dtype: torch.dtype, tensors: Stored, on_progress: Progress) -> Arrays:
    """Yield (name, array) for all weights, except an embedding usable from the checkpoint.

    One at a time, so that only one is in memory besides its source.
    """
    check_scales(tensors)
    if plan.table is not None and plan.table is not plan.lm_head:
        yield from _packed(plan.table, tensors)
    elif plan.table is None and (part := plan.embedding) is not None:
        yield from _embedding(part, dtype, tensors[part.weight])
    for norm in plan.norms:
        yield (
            norm.tensor,
            (_checked(tensors, norm.tensor, *norm.cut).float() + norm.offset).flatten(),
        )
    total, done = sum(matrix.num_weights for matrix in plan.matrices), 0
    for matrix in plan.matrices:
        yield from _packed(matrix, tensors)
        done += matrix.num_weights
        on_progress(done / total)


def _embedding(part: Part, dtype: torch.dtype, stored: StoredTensor) -> Arrays:
    """Yield it, unless it can be used from the checkpoint's mapped file."""
    if isinstance(stored, Tensor) and stored.dtype == dtype:
        check_finite({part.weight: stored[part.cut]})
        return
    rows = torch.empty(len(part.rows), stored.shape[1], dtype=dtype)
    for piece in pieces(part.rows, stored):
        decoded = _checked({part.weight: stored}, part.weight, piece)
        start = piece.start - part.rows.start
        rows[start : start + len(decoded)] = decoded
    yield part.weight, rows


def pieces(rows: range, stored: StoredTensor) -> Iterator[slice]:
    """Divide rows of what is decoded, so that little of it is in memory."""
    at_once = len(rows)
    if not isinstance(stored, Tensor):
        at_once = max(1, _PIECE_BYTES // (4 * stored.shape[-1]))
    for start in range(rows.start, rows.stop, at_once):
        yield slice(start, min(start + at_once, rows.stop))


def _checked(tensors: Stored, name: str, *part: slice) -> Tensor:
    """Return a tensor that will be read now anyway. Raises ModelError if it is not finite."""
    tensor = tensors[name][part]
    check_finite({name: tensor}, part[0].start if part else 0)
    return tensor


def _packed(matrix: Matrix, tensors: Stored) -> Arrays:
    packed = empty_packed(
        matrix.form,
        matrix.num_out,
        matrix.num_in,
        is_gated=matrix.is_gated,
        has_bias=matrix.has_bias,
    )
    for part, rows, (_, columns) in matrix.placed():
        first = rows.start - part.rows.start
        stored = tensors[part.weight]
        for piece in pieces(part.rows, stored):
            bias = _checked(tensors, part.bias, piece) if matrix.has_bias else None
            if not matrix.form.keeps_stored:
                weight = _checked(tensors, part.weight, piece, columns).contiguous()
                pack_rows(packed, first + piece.start, weight, bias)
            else:
                assert isinstance(stored, CodedTensor), "as planned"
                codes = stored.coded((piece, columns))
                check_codes(part.weight, codes, piece.start)
                pack_codes(packed, first + piece.start, codes, bias)
    yield from packed.named(matrix.name)


def _layer(layer: LayerPlan, arrays: Tensors) -> NativeLayer:
    def linears(matrices: Matrices) -> dict[str, PackedLinear]:
        return {name: PackedLinear.of(matrix, arrays) for name, matrix in matrices.items()}

    experts, choice = None, layer.mlp.choice
    if choice is not None:
        each = [linears(expert) for expert in layer.mlp.experts]
        bias = layer.mlp.score_bias
        experts = NativeExperts(
            each,
            choice.num_chosen,
            choice.normalizes_weights,
            choice.choice,
            None if bias is None else arrays[bias.tensor],
        )
    norms = {name: arrays[norm.tensor] for name, norm in layer.norms.items()}
    return NativeLayer(norms, linears(layer.matrices), experts, [*map(linears, layer.heads)])
