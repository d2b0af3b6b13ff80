"""The kernels of paged attention on CPUs behind the WritingAttention interface, one by one.

The extension checks all arguments before it runs a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.attention.interface import AttentionBatch, LayerKv, WritingAttention
from pdserve.engine.attention.reference import ReferenceAttention


class NativeAttention:
    """WritingAttention on pdserve._native; its threads are set by `_native.set_num_threads`.

    Args:
        variant: a kernel build of `_native.kernel_variants()`; "" is the best this CPU can run.
    """

    def __init__(self, variant: str = "") -> None:
        self._variant = variant

    @property
    def name(self) -> str:
        """The kernel build in use."""
        return f"native-{self._variant or _native.kernel_variants()[0]}"

    def write_kv(
        self, kv_pool: Tensor, layer: int, key: Tensor, value: Tensor | None, batch: AttentionBatch
    ) -> None:
        """See WritingAttention.write_kv."""
        _native.write_kv(kv_pool, layer, key, value, batch.slot_mapping)

    def attend(
        self, query: Tensor, kv: LayerKv, batch: AttentionBatch, out: Tensor | None = None
    ) -> Tensor:
        """See AttentionBackend.attend."""
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype)
        _native.paged_attention(
            query,
            kv.pool,
            kv.layer,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            kv.scale,
            0 if kv.sliding_window is None else kv.sliding_window,
            out,
            variant=self._variant,
            cap=kv.cap or 0.0,
            sinks=kv.sinks,
        )
        return out


def writing_attention(device: torch.device) -> WritingAttention:
    """For TorchDecoder on any device."""
    return NativeAttention() if device.type == "cpu" else ReferenceAttention()
