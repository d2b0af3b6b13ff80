"""Paged attention with our own Triton kernels: the launchers.

They check types, shapes and strides. Lengths and block ids are on the GPU, and checking them would
make every step wait, so the engine is trusted for these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch, LayerKv
from pdserve.engine.cuda.attention.split_keys import (
    MIN_SPLIT_KEYS,
    WIDE,
    num_splits,
    tile_heads,
)
from pdserve.engine.cuda.attention.triton_kernels import (
    attend_chunks,
    attend_single_rows,
    merge_splits,
)
from pdserve.engine.kv.coded_rows import SCALE_BYTES, as_scales, is_coded

# Triton loads block ids two tiles of keys ahead of the keys, and these two ahead of their use. With
# fewer stages a tile is waited for, and used, before the next is asked for.
_STAGES: Final = 5
_NO_WINDOW: Final = 1 << 30  # more than any position
_LOG2_E: Final = math.log2(math.e)
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class TritonAttention:
    """AttentionBackend for GPUs. Launches do not depend on contents of the GPU's memory.

    A row's result depends, bit for bit, only on the row, its request's KV, and on whether the
    request has one row or several in the step.
    """

    name = "triton"

    def __init__(self) -> None:
        # The batch that the layers before this one had, and what it consists of.
        self._batch: AttentionBatch | None = None
        self._content = _EVERYTHING

    def attend(
        self, query: Tensor, kv: LayerKv, batch: AttentionBatch, out: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of every query row over its request's blocks.

        Lengths and block ids are not checked.
        """
        call = _Call(query, kv, batch, _empty_out(query, kv) if out is None else out)
        if batch is not self._batch:
            self._batch, self._content = batch, _content_of(batch)
        if query.numel() and self._content.has_chunks:
            _launch_chunks(call)
        if query.numel() and self._content.has_single_rows:
            _launch_single_rows(call)
        return call.out

    def attend_decode(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        """Do the same as `attend`, with the same kernel, if every request has one row.

        A request without any context, such as a padding row, gives zeros.
        """
        call = _Call(query, kv, batch, _empty_out(query, kv))
        if len(query) != len(batch.context_lens):
            raise ValueError(f"{len(query)} rows of {len(batch.context_lens)} requests")
        if query.numel():
            _launch_single_rows(call)
        return call.out


@dataclass(frozen=True, slots=True)
class _Content:
    """Which of the two kinds of requests a batch has."""

    has_chunks: bool  # of several rows
    has_single_rows: bool


_EVERYTHING: Final = _Content(has_chunks=True, has_single_rows=True)


def _content_of(batch: AttentionBatch) -> _Content:
    """Return what the host knows of the batch; without that, it may be anything."""
    if batch.on_host is None:
        return _EVERYTHING
    num_rows = np.diff(batch.on_host.query_start.numpy())
    return _Content(bool((num_rows > 1).any()), bool((num_rows == 1).any()))


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one attention call, checked."""

    query: Tensor
    kv: LayerKv
    batch: AttentionBatch
    out: Tensor

    def __post_init__(self) -> None:
        query, pool, batch, out = self.query, self.kv.pool, self.batch, self.out
        if query.dtype not in _DTYPES or (query.dtype != pool.dtype and not self.has_codes):
            raise TypeError(f"query is {query.dtype}, the pool {pool.dtype}: both one of {_DTYPES}")
        if self.has_codes and self.kv.value_dim is not None:
            raise TypeError("rows of latent attention are not read as codes")
        if query.ndim != 3 or pool.ndim != 6 or pool.shape[2] != 1 + (self.kv.value_dim is None):
            raise ValueError(f"shapes {list(query.shape)} and {list(pool.shape)} are no attention")
        if query.shape[1] % pool.shape[3] or query.shape[2] != self.head_dim:
            raise ValueError(f"heads {list(query.shape[1:])} do not fit {list(pool.shape[3:])}")
        if not pool.is_contiguous() or query.stride(2) != 1:
            raise ValueError("the pool, and the query's last dimension, must be contiguous")
        shape = *query.shape[:2], self.value_dim
        if out.shape != shape or out.dtype != query.dtype or not out.is_contiguous():
            raise ValueError(f"the result is {list(shape)}, {query.dtype} and contiguous")
        sinks = self.kv.sinks
        if sinks is not None and (sinks.shape != query.shape[1:2] or sinks.dtype != torch.float32):
            raise ValueError(f"sinks {list(sinks.shape)} of {query.shape[1]} heads, in float32")
        if not 0 <= self.kv.layer < pool.shape[1]:
            raise ValueError(f"layer {self.kv.layer} of {pool.shape[1]}")
        if self.kv.sliding_window is not None and self.kv.sliding_window < 1:
            raise ValueError(f"a window of {self.kv.sliding_window} tokens")
        num_requests = len(batch.context_lens)
        if len(batch.query_start) != num_requests + 1 or len(batch.block_tables) != num_requests:
            raise ValueError(f"the batch is not of {num_requests} requests throughout")
        for tensor in (batch.query_start, batch.context_lens, batch.block_tables):
            if tensor.dtype != torch.int32 or tensor.device != pool.device:
                raise TypeError("query_start, context_lens and block_tables: int32, on the GPU")
            if tensor.numel() and tensor.stride(-1) != 1:
                raise ValueError("query_start, context_lens and block_tables must be contiguous")

    @property
    def has_codes(self) -> bool:
        """Whether the pool has them."""
        return is_coded(self.kv.pool.dtype)

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.kv.pool.shape[5] - SCALE_BYTES * self.has_codes

    @property
    def num_requests(self) -> int:
        return len(self.batch.context_lens)

    @property
    def group_size(self) -> int:
        return self.query.shape[1] // self.kv.pool.shape[3]

    @property
    def value_dim(self) -> int:
        """Numbers of a value, and of a head of the result."""
        return self.kv.value_dim or self.query.shape[2]

    @property
    def window(self) -> int:
        window = self.kv.sliding_window
        return _NO_WINDOW if window is None else window

    @property
    def num_keys(self) -> int:
        """Number of keys per tile: what fits into the registers and shared memory of an A100.

        Of codes half as many: what they are made of is in registers, too.
        """
        rest = self.query.shape[2] - self.value_dim
        wide = (padded(self.value_dim) + (padded(rest) if rest else 0)) * self.query.element_size()
        fitting = 64 if wide <= 256 else 32 if wide <= 512 else 16
        return max(16, fitting // 2) if self.has_codes else fitting

    @property
    def num_stages(self) -> int:
        """Tiles of keys that are under way, likewise."""
        return _STAGES - self.has_codes

    @property
    def num_lanes(self) -> int:
        """Rows times heads per tile of several rows: what fits into registers, likewise.

        As many as heads are wide, if that can be: with fewer, Triton shares out the keys among an
        A100's warps, which then have to meet for every maximum and sum.
        """
        head_dim = self.query.shape[2]
        if self.query.dtype == torch.float32 or head_dim > WIDE:
            return 32
        return 128 if head_dim <= 128 else 64

    @property
    def sinks(self) -> dict[str, Any]:
        """Return the arguments of kernels that sum up weights."""
        sinks = self.kv.sinks
        return {"sinks": self.query if sinks is None else sinks, "HAS_SINKS": sinks is not None}

    def arguments(self) -> dict[str, Any]:
        """Return the common arguments of the two kernels that read the pool, by name."""
        num_kv_heads, block_size, row_dim = self.kv.pool.shape[3:]
        head_dim, layer = self.head_dim, self.kv.layer
        scales = as_scales(self.kv.pool) if self.has_codes else self.kv.pool
        return {
            "query": self.query,
            "kv_layer": self.kv.pool[:, layer],
            "kv_scales": scales[:, layer],
            "query_start": self.batch.query_start,
            "context_lens": self.batch.context_lens,
            "block_tables": self.batch.block_tables,
            "token_stride": self.query.stride(0),
            "head_stride": self.query.stride(1),
            "table_stride": self.batch.block_tables.stride(0),
            "block_stride": self.kv.pool.stride(0),
            "scale_log2": self.kv.scale * _LOG2_E,
            "cap_log2": (self.kv.cap or 0.0) * _LOG2_E,
            "window": self.window,
            "HAS_CAP": self.kv.cap is not None,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": self.group_size,
            "HEAD_DIM": head_dim,
            "ROW_DIM": row_dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_N": self.num_keys,
            "BLOCK_D": padded(self.value_dim),
            "BLOCK_REST": padded(head_dim - self.value_dim),
        }


def padded(size: int) -> int:
    """Return size padded to a power of two, at least the smallest matrix instruction's."""
    return max(16, int(triton.next_power_of_2(size)))


def _empty_out(query: Tensor, kv: LayerKv) -> Tensor:
    shape = *query.shape[:2], kv.value_dim or query.shape[2]
    return torch.empty(shape, dtype=query.dtype, device=query.device)


def _launch_chunks(call: _Call) -> None:
    padded_group = int(triton.next_power_of_2(call.group_size))
    of_tile = min(padded_group, call.num_lanes)
    block_q = call.num_lanes // of_tile
    num_tiles = len(call.query) // block_q + call.num_requests
    head_tiles = padded_group // of_tile
    attend_chunks[(num_tiles * call.kv.pool.shape[3] * head_tiles,)](
        out=call.out,
        num_requests=call.num_requests,
        TILE_HEADS=of_tile,
        BLOCK_Q=block_q,
        enable_fp_fusion=True,
        num_warps=8,
        num_stages=call.num_stages,
        **call.sinks,
        **call.arguments(),
    )


def _launch_single_rows(call: _Call) -> None:
    num_heads, head_dim = call.query.shape[1:]
    num_kv_heads, block_size = call.kv.pool.shape[3:5]
    of_tile = tile_heads(call.group_size, head_dim)
    num_tiles = num_kv_heads * -(-call.group_size // of_tile)
    splits = num_splits(num_tiles)
    # No row sees more keys than this.
    most_keys = min(call.batch.block_tables.shape[1] * block_size, call.window + call.num_keys)
    used_splits = max(1, min(splits, -(-most_keys // MIN_SPLIT_KEYS)))
    device = call.query.device
    shape = (call.num_requests, num_heads, splits)
    partial_out = torch.empty((*shape, call.value_dim), dtype=torch.float32, device=device)
    partial_sums = torch.empty((*shape, 2), dtype=torch.float32, device=device)
    attend_single_rows[(used_splits * num_tiles * call.num_requests,)](
        partial_out=partial_out,
        partial_sums=partial_sums,
        used_splits=used_splits,
        BLOCK_M=of_tile,
        NUM_SPLITS=splits,
        MIN_SPLIT_KEYS=MIN_SPLIT_KEYS,
        enable_fp_fusion=True,
        num_warps=4,
        num_stages=call.num_stages,
        **call.arguments(),
    )
    merge_splits[(call.num_requests, num_heads)](
        partial_out,
        partial_sums,
        call.out,
        call.batch.query_start,
        call.batch.context_lens,
        call.window,
        **call.sinks,
        NUM_HEADS=num_heads,
        VALUE_DIM=call.value_dim,
        BLOCK_N=call.num_keys,
        BLOCK_D=padded(call.value_dim),
        NUM_SPLITS=splits,
        MIN_SPLIT_KEYS=MIN_SPLIT_KEYS,
        enable_fp_fusion=True,
        num_warps=max(1, splits // 16, splits * padded(call.value_dim) // 4096),
    )
