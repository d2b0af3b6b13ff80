"""The interface between a model and the attention kernels.

Implementations: `reference.py` (plain torch, any device, the oracle of the kernel tests), and those
of `cuda/attention/catalog.py`. All read the KV pool in the layout of `pdserve.kv.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The attention metadata of a batch, in the same form for prefill chunks and decode steps.

    Request r owns the rows query_start[r] .. query_start[r+1] of the batch. They are its newest
    tokens: its row i is at position context_lens[r] - (query_start[r+1] - query_start[r]) + i.
    """

    query_start: Tensor  # [num_requests + 1] int32, cumulative rows; the last is num_tokens
    context_lens: Tensor  # [num_requests] int32, KV tokens present once this step's are written
    block_tables: Tensor  # [num_requests, max_blocks] int32; entries past the context are ignored
    slot_mapping: Tensor  # [num_tokens] int64, block_id * block_size + offset
    on_host: AttentionBatch | None = None  # the same on the host, if this is on another device


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The keys and values of one layer, and how queries see them."""

    pool: Tensor  # [num_blocks, *KvLayout.block_shape], contiguous; perhaps of codes
    layer: int  # index into the pool's second dimension
    scale: float  # factor on the dot products, usually head_dim ** -0.5
    sliding_window: int | None = None  # a query at p sees the keys in (p - window, p]; None: all
    cap: float | None = None  # scores become cap * tanh(score / cap); None: they do not
    sinks: Tensor | None = None  # [num_heads] float32: one more score of each head, of no value
    # Of a pool without values, so many of the first numbers of a key are one; None: there are some.
    value_dim: int | None = None


class Attend(Protocol):
    """A function like AttentionBackend.attend, for those that need no place for the result."""

    def __call__(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, /) -> Tensor:
        """Return [num_tokens, num_heads, numbers of a value]."""


class AttentionBackend(Protocol):
    """Attends over keys and values in the paged pool."""

    @property
    def name(self) -> str:
        """Short name for logs and `pdserve doctor`."""

    def attend(
        self, query: Tensor, kv: LayerKv, batch: AttentionBatch, out: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of every query row over its request's blocks.

        A row's result depends, bit for bit, only on that row and its request's KV: not on the rest
        of the batch, and not on how its prompt was split into chunks.

        Args:
            query: [num_tokens, num_heads, head_dim]; only the last dimension need be contiguous.
            kv: of the layer.
            batch: all fields except `slot_mapping` are read.
            out: where to put the result; None: in new memory.

        Returns:
            [num_tokens, num_heads, numbers of a value], contiguous, dtype of `query`.

        Raises:
            TypeError: a tensor is on the wrong device, or of the wrong dtype.
            ValueError: a shape, a stride, the layer, a length or a block id is out of range.
        """


class WritingAttention(AttentionBackend, Protocol):
    """Also writes keys and values, for `TorchDecoder`: other decoders do so as they rotate keys."""

    def write_kv(
        self, kv_pool: Tensor, layer: int, key: Tensor, value: Tensor | None, batch: AttentionBatch
    ) -> None:
        """Store this step's keys and values of one layer at `batch.slot_mapping`.

        Args:
            kv_pool: [num_blocks, *KvLayout.block_shape], contiguous.
            layer: index into the pool's second dimension.
            key: [num_tokens, heads of the pool, head_dim]; its last dimension is contiguous.
            value: like `key`; None: the pool has one plane, whose rows are both.
            batch: only `slot_mapping` is read; its slots are distinct.

        Raises:
            TypeError: a tensor is no CPU tensor, or of the wrong dtype.
            ValueError: a shape, a stride, the layer or a slot is out of range.
        """
