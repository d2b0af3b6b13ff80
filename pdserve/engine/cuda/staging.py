"""Batches from the host to the GPU: one pinned buffer, one copy, nobody waits.

There are two buffers, so that the next batch can be laid out while the last one's copy is still
under way. A buffer is filled again only after the event behind its copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.engine.batch import Batch

_ALIGNMENT: Final = 16  # bytes, between two tensors of a batch
_NUM_BUFFERS: Final = 2


class Mark(Protocol):
    """A place in the GPU's work."""

    def synchronize(self) -> None:
        """Wait until the GPU is past it."""


class HostCopies(Protocol):
    """What the staging needs of CUDA; tests have one that copies as late as it may."""

    def pinned(self, num_bytes: int) -> Tensor:
        """New host memory that can be copied from while the program goes on: uint8[num_bytes]."""

    def start(self, source: Tensor) -> tuple[Tensor, Mark]:
        """Begin to copy pinned bytes: where they will be, and the mark behind the copy."""


class CudaCopies:
    """HostCopies on the current stream of a GPU: what is launched later finds the bytes there."""

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
    copied: Mark | None = None  # behind the last copy out of it


class Staging:
    """Uploads batches, one after the other."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._buffers = [_Buffer(copies.pinned(0)) for _ in range(_NUM_BUFFERS)]

    def upload(self, batch: Batch) -> Batch:
        """The batch on the GPU, by one copy that may still be under way.

        The batch's own tensors are not needed any more when this returns.
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
        """The buffer that was used longest ago; nothing is copied out of it any more."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        if len(buffer.memory) < num_bytes:
            buffer.memory = self._copies.pinned(2 * num_bytes)
        return buffer


def _part(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor of this shape and dtype over the bytes from `offset` on."""
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
