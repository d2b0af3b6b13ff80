"""Stand-ins for FlashInfer and FlashAttention 3, written from their documentation, in plain torch.

They take what the real ones take, under the same names, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_left: int, is_causal: bool
) -> Tensor:
    """[rows, heads, dim] over keys [tokens, kv_heads, dim]; the last row sees the last key.

    `num_left` keys before a row's own are seen; all of them if it is negative.
    """
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1).float()
    value = value.repeat_interleave(group_size, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    is_seen = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        is_seen &= distance >= 0
    if num_left >= 0:
        is_seen &= distance <= num_left
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


@dataclass
class Plan:
    """What `plan` was told."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    page_size: int
    causal: bool
    sm_scale: float
    window_left: int


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert ((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        assert sm_scale is not None
        assert q_data_type == kv_data_type
        assert disable_split_kv
        self._shape = (num_kv_heads, page_size, head_dim_qk)
        self._plan = Plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            page_size,
            causal,
            sm_scale,
            window_left,
        )
        BatchPrefillWithPagedKVCacheWrapper.num_plans += 1

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None
    ) -> Tensor:
        plan = self._plan
        out = torch.empty_like(q) if out is None else out
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == self._shape
        assert keys.stride() == values.stride()
        for r in range(len(plan.last_page_len)):
            pages = plan.kv_indices[plan.kv_indptr[r] : plan.kv_indptr[r + 1]].long()
            count = (len(pages) - 1) * plan.page_size + int(plan.last_page_len[r])
            rows = slice(int(plan.qo_indptr[r]), int(plan.qo_indptr[r + 1]))
            # [pages, heads, page_size, dim] -> [tokens, heads, dim]
            key, value = (
                cache[pages].transpose(1, 2).flatten(0, 1)[:count] for cache in (keys, values)
            )
            out[rows] = attend(q[rows], key, value, plan.sm_scale, plan.window_left, plan.causal)
        return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
) -> Tensor:
    """flash_attn_interface.flash_attn_with_kvcache, of FlashAttention 3."""
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert num_splits == 1
    assert window_size == (-1, -1) or window_size[1] == 0
    out = torch.empty_like(q)
    page_size = k_cache.shape[1]
    for r, count in enumerate(cache_seqlens.tolist()):
        pages = page_table[r, : -(-count // page_size)].long()
        rows = slice(int(cu_seqlens_q[r]), int(cu_seqlens_q[r + 1]))
        key, value = (cache[pages].flatten(0, 1)[:count] for cache in (k_cache, v_cache))
        out[rows] = attend(q[rows], key, value, softmax_scale, window_size[0], causal)
    return out
