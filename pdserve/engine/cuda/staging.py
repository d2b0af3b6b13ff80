"""Uploads batches from the host to the GPU: one asynchronous copy from one pinned buffer.

There are two buffers, so that the next batch can be laid out while the last one is still being
copied. A buffer is reused only after the event recorded behind its copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.engine.steps.batch import Batch

_ALIGNMENT: Final = 16  # bytes, of each tensor in the buffer
_NUM_BUFFERS: Final = 2


class Mark(Protocol):
    """A point in the GPU's stream of work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait until the GPU has passed this point."""


class HostCopies(Protocol):
    """The part of CUDA that staging needs; tests use one that copies as late as allowed."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory for asynchronous copies: uint8[num_bytes]."""

    def start(self, source: Tensor) -> tuple[Tensor, Mark]:
        """Start copying pinned bytes; return the destination, and a mark behind the copy."""


class CudaCopies:
    """HostCopies on the current stream of a GPU, so that later launches see the copied bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, num_bytes: int) -> Tensor:
        """See HostCopies.pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, source: Tensor) -> tuple[Tensor, Mark]:
        """See HostCopies.start. The caching allocator makes no call to CUDA in steady state."""
        copy = source.to(self._device, non_blocking=True)
        return copy, torch.cuda.current_stream(self._device).record_event()


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # uint8
    copied: Mark | None = None  # mark behind the last copy out of the buffer


class Staging:
    """Uploads batches, one after the other."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._buffers = [_Buffer(copies.pinned(0)) for _ in range(_NUM_BUFFERS)]

    def upload(self, batch: Batch) -> Batch:
        """Return the batch on the GPU. The copy may still be in progress.

        The batch's own tensors may be overwritten as soon as this returns.
        """
        attention = batch.attention
        tensors = [
            batch.token_ids,
            batch.positions,
            batch.sampled_rows,
            attention.slot_mapping,
            attention.query_start,
            attention.context_lens,
            attention.block_tables,
        ]
        token_ids, positions, sampled_rows, slots, starts, lens, tables = self._copy(tensors)
        return replace(
            batch,
            token_ids=token_ids,
            positions=positions,
            sampled_rows=sampled_rows,
            attention=replace(
                attention,
                query_start=starts,
                context_lens=lens,
                block_tables=tables,
                slot_mapping=slots,
            ),
        )

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._next(end)
        for tensor, offset in zip(tensors, offsets, strict=True):
            _part(buffer.memory, offset, tensor).copy_(tensor)
        there, buffer.copied = self._copies.start(buffer.memory[:end])
        return [
            _part(there, offset, tensor) for tensor, offset in zip(tensors, offsets, strict=True)
        ]

    def _next(self, num_bytes: int) -> _Buffer:
        """Return the least recently used buffer, after waiting for the copy out of it."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        if len(buffer.memory) < num_bytes:
            buffer.memory = self._copies.pinned(2 * num_bytes)
        return buffer


def _part(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view of the memory from `offset` on, with the shape and dtype of `like`."""
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
