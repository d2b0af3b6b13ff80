"""Paged attention in plain torch, on any device: the oracle, and the fallback without kernels.

Simple rather than fast: one request at a time, gathered keys and values, all scores in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch, LayerKv
from pdserve.engine.kv.coded_rows import decoded, encoded, is_coded
from pdserve.engine.layers import capped


class ReferenceAttention:
    """WritingAttention in plain torch."""

    name = "reference"

    def write_kv(
        self, kv_pool: Tensor, layer: int, key: Tensor, value: Tensor | None, batch: AttentionBatch
    ) -> None:
        """Store this step's keys and values of one layer at `batch.slot_mapping`."""
        block_size = kv_pool.shape[4]
        block_ids = torch.div(batch.slot_mapping, block_size, rounding_mode="floor")
        offsets = batch.slot_mapping % block_size
        for plane, rows in enumerate([key] if value is None else [key, value]):
            stored = encoded(rows, kv_pool.dtype) if is_coded(kv_pool.dtype) else rows
            kv_pool[block_ids, layer, plane, :, offsets] = stored

    def attend(
        self, query: Tensor, kv: LayerKv, batch: AttentionBatch, out: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of every query row over its request's blocks."""
        if out is None:
            out = query.new_empty(*query.shape[:2], kv.value_dim or query.shape[2])
        starts: list[int] = batch.query_start.tolist()
        context_lens: list[int] = batch.context_lens.tolist()
        for r, context_len in enumerate(context_lens):
            rows = slice(starts[r], starts[r + 1])
            keys, values = _gather(kv.pool, kv.layer, batch.block_tables[r], context_len)
            out[rows] = _attend_one(query[rows], keys, values[:, :, : kv.value_dim], kv)
        return out


def _gather(
    kv_pool: Tensor, layer: int, block_table: Tensor, context_len: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values of one request: [num_kv_heads, context_len, head_dim] float32 each."""
    block_size = kv_pool.shape[4]
    num_blocks = -(-context_len // block_size)
    # [num_blocks, num_planes, num_kv_heads, block_size, head_dim]
    blocks = decoded(kv_pool[block_table[:num_blocks].long(), layer])
    # [num_planes, num_kv_heads, num_blocks * block_size, head_dim]
    tokens = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context_len]
    return tokens[0], tokens[-1]


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, kv: LayerKv) -> Tensor:
    """Return [num_rows, num_heads, head_dim] of one request, whose rows are its newest tokens."""
    num_rows, num_heads, _ = query.shape
    num_kv_heads, context_len, _ = keys.shape
    group_size = num_heads // num_kv_heads
    keys = keys.repeat_interleave(group_size, dim=0)
    values = values.repeat_interleave(group_size, dim=0)
    scores = capped(query.float().transpose(0, 1) @ keys.transpose(1, 2) * kv.scale, kv.cap)
    positions = torch.arange(context_len - num_rows, context_len, device=query.device)[:, None]
    key_positions = torch.arange(context_len, device=query.device)[None, :]
    hidden = key_positions > positions
    if kv.sliding_window is not None:
        unseen = max(0, context_len - num_rows - kv.sliding_window + 1)
        keys[:, :unseen] = values[:, :unseen] = 0  # whatever is there: 0 x NaN is NaN
        hidden |= key_positions <= positions - kv.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if kv.sinks is not None:
        sinks = kv.sinks[:, None, None].expand(-1, num_rows, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)
