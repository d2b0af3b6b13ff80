"""Paged attention by FlashInfer, where it is installed.

It reads a layer of our pool in place: [num_blocks, num_kv_heads, block_size, head_dim] ("HND"),
strided. Splitting of a row's keys over the GPU is disabled, so that the order of summation in a row
does not depend on the batch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch, LayerKv

_WORKSPACE_BYTES: Final = 128 << 20  # what FlashInfer's own documentation advises


class FlashInferAttention:
    """AttentionBackend on FlashInfer's paged prefill kernels, which handle decode rows as well.

    FlashInfer plans on the host, once per batch and window, from the host's copy of the batch.
    """

    name = "flashinfer"

    def __init__(self, library: Any, device: torch.device) -> None:
        """Take the module `flashinfer`, and allocate the workspace for its kernels."""
        self._library = library
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # The batch that the plans are for. Kept alive, so that no other one can be the same object.
        self._batch: AttentionBatch | None = None
        self._plans: dict[tuple[int | None, float], Any] = {}  # (window, scale) |-> wrapper

    def attend(
        self, query: Tensor, kv: LayerKv, batch: AttentionBatch, out: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of every query row over its request's blocks."""
        if batch is not self._batch:
            self._plans.clear()
            self._batch = batch
        key = (kv.sliding_window, kv.scale)
        if key not in self._plans:
            self._plans[key] = self._plan(query, kv, batch)
        caches = (kv.pool[:, kv.layer, 0], kv.pool[:, kv.layer, 1])
        attended: Tensor = self._plans[key].run(query.contiguous(), caches, out=out)
        return attended

    def _plan(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Any:
        num_kv_heads, block_size, head_dim = kv.pool.shape[3:]
        on_host = batch.on_host or batch
        starts, block_ids, last_lens = ragged_blocks(on_host, block_size)
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        wrapper.plan(
            on_host.query_start.cpu(),
            starts,
            block_ids.to(query.device),
            last_lens,
            query.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=kv.scale,
            # Our window includes the query's own token, theirs does not.
            window_left=-1 if kv.sliding_window is None else kv.sliding_window - 1,
            q_data_type=query.dtype,
            kv_data_type=kv.pool.dtype,
            disable_split_kv=True,
        )
        return wrapper


def ragged_blocks(batch: AttentionBatch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block tables in ragged form, without padding, on the host. Waits for a GPU's.

    Returns:
        [num_requests + 1] int32, where each request's blocks begin;
        [sum of blocks] int32, the block ids of all requests, concatenated;
        [num_requests] int32, the number of tokens in each request's last block.
    """
    lens = batch.context_lens.cpu().numpy().astype(np.int64)
    tables = batch.block_tables.cpu().numpy()
    counts = -(-lens // block_size)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    block_ids = tables[np.arange(tables.shape[1])[None, :] < counts[:, None]]
    last_lens = (lens - (counts - 1) * block_size).astype(np.int32)
    return (
        torch.from_numpy(starts),
        torch.from_numpy(np.ascontiguousarray(block_ids, dtype=np.int32)),
        torch.from_numpy(last_lens),
    )
