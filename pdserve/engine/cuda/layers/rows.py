"""Norms, activation, rotation and cache writes on GPUs: launchers of fused Triton kernels.

The launchers check their arguments. The kernels compute in float32, and round once, when storing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.cuda.layers.row_kernels import (
    activate_and_multiply_rows,
    add_rms_norm_rows,
    rotate_and_write_heads,
    spread_table_rows,
    take_sampled_tokens,
)
from pdserve.engine.kv.coded_rows import SCALE_BYTES, as_scales, is_coded
from pdserve.engine.models.arithmetic import Activation

_GATED_BLOCK: Final = 1024
_ROTATED: Final = 256  # pairs of numbers of a warp: each thread loads and stores 16 bytes at a time
_TABLE_BLOCK: Final = 1024
_TOKEN_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation of a step's queries and keys, with the preceding norm for models that have one."""

    cos: Tensor  # [num_tokens, head_dim / 2] float32
    sin: Tensor  # like cos
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    eps: float


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Add the delta to the residual in place; return the normalised sum.

    Args:
        residual: [num_rows, size] float32, contiguous; without a delta, of any dtype.
        delta: same shape, contiguous, any dtype; None adds nothing.
        weight: [size].
        eps: added to the mean square.
        dtype: of the result; None: the weight's.

    Returns:
        [num_rows, size], contiguous.
    """
    num_rows, size = residual.shape
    if (delta is not None and residual.dtype != torch.float32) or not residual.is_contiguous():
        raise TypeError("the residual must be float32 and contiguous")
    if tuple(weight.shape) != (size,) or not weight.is_contiguous():
        raise ValueError(f"a weight of shape {list(weight.shape)} for rows of {size}")
    if delta is not None and (delta.shape != residual.shape or not delta.is_contiguous()):
        raise ValueError(f"{list(delta.shape)} cannot be added to {list(residual.shape)}")
    out = torch.empty((num_rows, size), dtype=dtype or weight.dtype, device=residual.device)
    if num_rows:
        add_rms_norm_rows[(num_rows,)](
            residual,
            residual if delta is None else delta,
            weight,
            out,
            eps,
            SIZE=size,
            HAS_DELTA=delta is not None,
            BLOCK=int(triton.next_power_of_2(size)),
            enable_fp_fusion=True,
            num_warps=4 if size <= 4096 else 8,
        )
    return out


def silu_mul(rows: Tensor) -> Tensor:
    """Return silu(gate) * up: [num_rows, 2 * size] -> [num_rows, size], both contiguous."""
    return _activated(rows, Activation.SILU)


def gelu_mul(rows: Tensor) -> Tensor:
    """Return gelu(gate) * up, by tanh: [num_rows, 2 * size] -> [num_rows, size], likewise."""
    return _activated(rows, Activation.GELU_TANH)


def clamped_mul(rows: Tensor) -> Tensor:
    """Return what gpt-oss makes of both (`gated_clamped`): likewise."""
    return _activated(rows, Activation.CLAMPED)


GATED: Final = {
    Activation.SILU: silu_mul,
    Activation.GELU_TANH: gelu_mul,
    Activation.CLAMPED: clamped_mul,
}


def _activated(rows: Tensor, activation: Activation) -> Tensor:
    num_rows, double = rows.shape
    if double % 2 or not rows.is_contiguous():
        raise ValueError(f"gate and up of shape {list(rows.shape)}: contiguous, and of one size")
    size = double // 2
    out = torch.empty((num_rows, size), dtype=rows.dtype, device=rows.device)
    if num_rows:
        grid = (num_rows, -(-size // _GATED_BLOCK))
        activate_and_multiply_rows[grid](
            rows,
            out,
            ACTIVATION=activation.value,
            SIZE=size,
            BLOCK=_GATED_BLOCK,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return out


def rotate_and_write(
    qkv: Tensor,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_pool: Tensor,
    layer: int,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, and write keys and values into the pool.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous.
        rotation: for these tokens and this layer.
        slot_mapping: [num_tokens] int64, where to write each token's KV; nothing is written if
            negative. Slots are not checked, because they are on the GPU.
        kv_pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; of
            codes, rows are as `kv/coded_rows.py` has them.
        layer: index into the pool's second dimension.
        out: where to put the queries; None: in new memory.

    Returns:
        The queries: [num_tokens, num_heads, head_dim], contiguous.
    """
    check_slots(kv_pool, layer, slot_mapping, len(qkv), num_planes=2)
    num_kv_heads, block_size, row_dim = kv_pool.shape[3:]
    head_dim, scales = row_dim, kv_pool
    if is_coded(kv_pool.dtype):
        head_dim, scales = row_dim - SCALE_BYTES, as_scales(kv_pool)
    num_heads, rest = divmod(qkv.shape[1] - 2 * num_kv_heads * head_dim, head_dim)
    if rest or num_heads < 1 or head_dim % 2:
        raise ValueError(f"rows of {qkv.shape[1]} are no heads of {head_dim} for this pool")
    if (qkv.dtype != kv_pool.dtype and scales is kv_pool) or not qkv.is_contiguous():
        raise TypeError(f"qkv must be contiguous and {kv_pool.dtype}")
    for angles in (rotation.cos, rotation.sin):
        if angles.numel() != len(qkv) * (head_dim // 2) or angles.dtype != torch.float32:
            raise ValueError("cos and sin must be float32, half a head for each token")
    norm = rotation.qk_norm
    if norm is not None and tuple(norm.shape) != (num_heads + num_kv_heads, head_dim):
        raise ValueError(f"a norm of shape {list(norm.shape)} for {num_heads} query heads")
    shape = (len(qkv), num_heads, head_dim)
    if out is None:
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    elif tuple(out.shape) != shape or out.dtype != qkv.dtype or not out.is_contiguous():
        raise ValueError(f"queries are {list(shape)}, {qkv.dtype} and contiguous")
    if len(qkv):
        block = int(triton.next_power_of_2(head_dim // 2))
        block_heads = max(1, _ROTATED // block)
        rotate_and_write_heads[(len(qkv), -(-(num_heads + 2 * num_kv_heads) // block_heads))](
            qkv,
            rotation.cos.contiguous(),
            rotation.sin.contiguous(),
            qkv if norm is None else norm,
            slot_mapping,
            out,
            kv_pool[:, layer],
            scales[:, layer],
            kv_pool.stride(0),
            rotation.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROW_DIM=row_dim,
            BLOCK_SIZE=block_size,
            HAS_QK_NORM=norm is not None,
            BLOCK_HEADS=block_heads,
            BLOCK=block,
            enable_fp_fusion=True,
            num_warps=1,
        )
    return out


def take_sampled(token_ids: Tensor, sampled: Tensor) -> None:
    """Fill in the tokens that the step before has sampled.

    Args:
        token_ids: [num_tokens] int64, contiguous; -1 - i is replaced by `sampled[i]`. What is
            negative is not checked, because it is on the GPU.
        sampled: [num_sampled] int32, contiguous.
    """
    if token_ids.dtype != torch.int64 or sampled.dtype != torch.int32:
        raise TypeError("token ids must be int64, those that were sampled int32")
    if not (token_ids.is_contiguous() and sampled.is_contiguous()):
        raise ValueError("token ids must be contiguous")
    if len(token_ids):
        take_sampled_tokens[(-(-len(token_ids) // _TOKEN_BLOCK),)](
            token_ids,
            sampled,
            len(token_ids),
            BLOCK=_TOKEN_BLOCK,
            enable_fp_fusion=True,
            num_warps=4,
        )


def spread_tables(
    tables: Tensor, width: Tensor, context_lens: Tensor, out: Tensor, block_size: int
) -> None:
    """Copy block tables to rows of another length, without what is behind each context.

    Args:
        tables: int32, [num_rows, width] in its first elements.
        width: [1] int32, on the GPU like all others; at most that of `out`.
        context_lens: [num_rows] int32, in tokens.
        out: [num_rows, max_blocks] int32, written; only the last dimension need be contiguous.
        block_size: tokens in a block.
    """
    if not tables.dtype == width.dtype == context_lens.dtype == out.dtype == torch.int32:
        raise TypeError("block tables, their width and context lengths must be int32")
    if len(out) != len(context_lens) or out.stride(1) != 1:
        raise ValueError(f"{list(out.shape)} for {len(context_lens)} rows, each contiguous")
    if len(out):
        spread_table_rows[(len(out),)](
            tables,
            width,
            context_lens,
            out,
            out.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=min(_TABLE_BLOCK, int(triton.next_power_of_2(out.shape[1]))),
            enable_fp_fusion=True,
            num_warps=4,
        )


def check_slots(
    kv_pool: Tensor, layer: int, slot_mapping: Tensor, num_tokens: int, *, num_planes: int
) -> None:
    """Raises TypeError, ValueError: tokens of a layer cannot be written to slots of this pool."""
    if kv_pool.ndim != 6 or kv_pool.shape[2] != num_planes or not kv_pool.is_contiguous():
        raise ValueError(f"no KV pool: {list(kv_pool.shape)}")
    if not 0 <= layer < kv_pool.shape[1]:
        raise ValueError(f"layer {layer} of {kv_pool.shape[1]}")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise TypeError("slot_mapping must be int64 and contiguous")
    if len(slot_mapping) != num_tokens:
        raise ValueError(f"{len(slot_mapping)} slots for {num_tokens} tokens")
