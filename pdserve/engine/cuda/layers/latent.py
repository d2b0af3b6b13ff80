"""Latent attention on a GPU, around attention itself (`models/latent.py`).

Products of heads are batched ones of cuBLAS. One kernel rotates queries, and norms, rotates and
writes the row that is kept of each token.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.cuda.layers.latent_kernels import rotate_and_write_rows
from pdserve.engine.cuda.layers.rows import add_rms_norm, check_slots
from pdserve.engine.models.latent import LatentShape
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.rope import Angles

_ROTATED: Final = 256  # pairs of numbers of a warp


def latent_queries(
    layer: LayerWeights,
    shape: LatentShape,
    normed: Tensor,
    angles: Angles,
    slots: Tensor,
    kv_pool: Tensor,
    place: int,
    out: Tensor | None = None,
) -> Tensor:
    """Write a layer's rows into the pool; return queries that score them.

    Args:
        layer: its weights.
        shape: of the model.
        normed: [num_tokens, hidden_size], what the layer takes.
        angles: of the tokens.
        slots: [num_tokens] int64, where rows go; nothing is written if negative.
        kv_pool: [num_blocks, num_layers, 1, 1, block_size, row_dim], contiguous.
        place: of the layer in the pool.
        out: where to put the queries; None: in new memory.

    Returns:
        [num_tokens, num_heads, row_dim], contiguous.
    """
    source, mixer = normed, layer.mixer
    if shape.query_rank is not None:
        latent = mixer["query_latent"](normed)
        source = add_rms_norm(latent, None, layer.norms["query_latent_norm"], shape.norm_eps)
    queries = mixer["queries"](source).view(len(normed), -1, shape.query_dim)
    if out is None:
        out = queries.new_empty(*queries.shape[:2], shape.row_dim)
    _of_heads(layer.heads["key"].weight, queries[:, :, : shape.nope_dim], out[:, :, : shape.rank])
    rows, norm = mixer["latent"](normed), layer.norms["latent_norm"]
    rotate_and_write(queries, rows, norm, shape, angles, slots, kv_pool, place, out)
    return out


def latent_values(layer: LayerWeights, attended: Tensor) -> Tensor:
    """[num_tokens, num_heads, rank], sums of rows -> [num_tokens, num_heads, value_dim]."""
    stack = layer.heads["value"].weight
    out = attended.new_empty(*attended.shape[:2], stack.shape[1])
    _of_heads(stack, attended, out)
    return out


def _of_heads(stack: Tensor, x: Tensor, out: Tensor) -> None:
    """[num_tokens, num_heads, in], by each head's own of [num_heads, out, in], into `out`."""
    torch.bmm(x.transpose(0, 1), stack.transpose(1, 2), out=out.transpose(0, 1))


def rotate_and_write(
    queries: Tensor,
    rows: Tensor,
    norm: Tensor,
    shape: LatentShape,
    angles: Angles,
    slots: Tensor,
    kv_pool: Tensor,
    place: int,
    out: Tensor,
) -> None:
    """Rotate the last part of queries into `out`; norm, rotate and write the rows of the tokens.

    Args:
        queries: [num_tokens, num_heads, query_dim], contiguous.
        rows: [num_tokens, row_dim], contiguous.
        norm: [rank], the weight of the norm.
        shape: of the model.
        angles: cos and sin, float32, rope_dim / 2 numbers of each token.
        slots: as latent_queries.
        kv_pool: likewise.
        place: likewise.
        out: [num_tokens, num_heads, row_dim], contiguous; only its last part is written.
    """
    check_slots(kv_pool, place, slots, len(rows), num_planes=1)
    num_heads, half = queries.shape[1], shape.rope_dim // 2
    if kv_pool.shape[3] != 1 or kv_pool.shape[5] != shape.row_dim:
        raise ValueError(f"no rows of {shape.row_dim} numbers: {list(kv_pool.shape)}")
    if queries.shape[2] != shape.query_dim or out.shape != (*queries.shape[:2], shape.row_dim):
        raise ValueError(f"queries {list(queries.shape)} into {list(out.shape)}")
    if rows.shape != (len(queries), shape.row_dim) or norm.shape != (shape.rank,):
        raise ValueError(f"rows {list(rows.shape)} with a norm of {list(norm.shape)}")
    for tensor in (queries, rows, norm, out):
        if not tensor.is_contiguous():
            raise ValueError("queries, rows, norm and result must be contiguous")
    if not queries.dtype == rows.dtype == kv_pool.dtype == out.dtype:
        raise TypeError(f"queries and rows must be {kv_pool.dtype}")
    for angle in angles:
        if angle.numel() != len(rows) * half or angle.dtype != torch.float32:
            raise ValueError("cos and sin must be float32, half a rotated part for each token")
    if not len(rows):
        return
    cos, sin = angles
    block = int(triton.next_power_of_2(half))
    block_heads = max(1, _ROTATED // block)
    rotate_and_write_rows[(len(rows), 1 + -(-num_heads // block_heads))](
        queries,
        rows,
        norm,
        cos.contiguous(),
        sin.contiguous(),
        slots,
        out,
        kv_pool[:, place],
        kv_pool.stride(0),
        shape.norm_eps,
        NUM_HEADS=num_heads,
        NOPE=shape.nope_dim,
        RANK=shape.rank,
        HALF=half,
        BLOCK_SIZE=kv_pool.shape[4],
        BLOCK_HEADS=block_heads,
        BLOCK_RANK=int(triton.next_power_of_2(shape.rank)),
        BLOCK=block,
        enable_fp_fusion=True,
        num_warps=1,
    )
