"""Paged attention by FlashAttention 3 (the module `flash_attn_interface`), where it is installed.

It wants [num_blocks, block_size, num_kv_heads, head_dim], of which only the last dimension must be
contiguous: a transposed view of our pool. FlashAttention 2 cannot be used: its pages are multiples
of 256 tokens. Splitting a row's keys is switched off, so that the batch does not decide how a row
is summed up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch
from pdserve.engine.cuda.rows import write_kv


class FlashAttention:
    """AttentionBackend on FlashAttention 3."""

    name = "flash_attn"

    def __init__(self, library: Any) -> None:
        """Take the module `flash_attn_interface`."""
        self._library = library

    def write_kv(
        self, kv_pool: Tensor, layer: int, key: Tensor, value: Tensor, batch: AttentionBatch
    ) -> None:
        """See AttentionBackend.write_kv. Slots are not checked."""
        write_kv(kv_pool, layer, key, value, batch.slot_mapping)

    def attend(
        self,
        query: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See AttentionBackend.attend."""
        out: Tensor = self._library.flash_attn_with_kvcache(
            query,
            kv_pool[:, layer, 0].transpose(1, 2),
            kv_pool[:, layer, 1].transpose(1, 2),
            cache_seqlens=batch.context_lens,
            page_table=batch.block_tables,
            cu_seqlens_q=batch.query_start,
            # A bound that is known without asking the GPU; programs past a request's rows end.
            max_seqlen_q=len(query),
            softmax_scale=scale,
            causal=True,
            # Ours counts the query's own token, theirs does not.
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            num_splits=1,
        )
        return out
