"""Paged attention by FlashAttention 3 (the module `flash_attn_interface`), where it is installed.

It expects [num_blocks, block_size, num_kv_heads, head_dim], with only the last dimension
contiguous, so it gets a transposed view of our pool. FlashAttention 2 cannot be used: its pages are
multiples of 256 tokens. Splitting of a row's keys is disabled, so that the order of summation in a
row does not depend on the batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch, LayerKv


class FlashAttention:
    """AttentionBackend on FlashAttention 3."""

    name = "flash_attn"

    def __init__(self, library: Any) -> None:
        """Take the module `flash_attn_interface`."""
        self._library = library

    def attend(
        self, query: Tensor, kv: LayerKv, batch: AttentionBatch, out: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of every query row over its request's blocks.

        The library has no place for the result: it is copied.
        """
        # An upper bound known without waiting for the GPU; programs past a request's rows exit.
        attended = self._attend(query, kv, batch, len(query))
        return attended if out is None else out.copy_(attended)

    def attend_decode(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        """Compute causal attention where every request has one row."""
        return self._attend(query, kv, batch, 1)

    def _attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, most_rows: int) -> Tensor:
        window = kv.sliding_window
        out: Tensor = self._library.flash_attn_with_kvcache(
            query,
            kv.pool[:, kv.layer, 0].transpose(1, 2),
            kv.pool[:, kv.layer, 1].transpose(1, 2),
            cache_seqlens=batch.context_lens,
            page_table=batch.block_tables,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=most_rows,
            softmax_scale=kv.scale,
            causal=True,
            # Our window includes the query's own token, theirs does not.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            num_splits=1,
        )
        return out
