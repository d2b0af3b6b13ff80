"""Moves what a step needs between host and GPU: one asynchronous copy each way.

What goes up is gathered in one of two pinned buffers, so that the next batch can be laid out while
the last one is still being copied. A buffer is reused only after the event recorded behind its
copy. What comes down is waited for, which is the only wait of a step: at once, or when the next
step has been launched. So two pinned buffers take turns for it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.engine.cuda.copies.packing import Packing
from pdserve.engine.steps.batch import Batch, StateTables

_NUM_BUFFERS: Final = 2


class Mark(Protocol):
    """A point in the GPU's stream of work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait until the GPU has passed this point."""


class HostCopies(Protocol):
    """The part of CUDA that staging needs; tests use one that copies as late as allowed."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory for asynchronous copies: uint8[num_bytes]."""

    def start(self, source: Tensor, destination: Tensor | None) -> tuple[Tensor, Mark]:
        """Start copying pinned memory; return the destination, and a mark behind the copy.

        The destination is on the GPU, of the same shape and dtype; None is for new memory.
        """

    def fetch(self, source: Tensor, destination: Tensor) -> Mark:
        """Start copying from the GPU to pinned memory, and return a mark behind the copy."""


class CudaCopies:
    """HostCopies on the current stream of a GPU, so that later launches see the copied bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory for asynchronous copies: uint8[num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, source: Tensor, destination: Tensor | None) -> tuple[Tensor, Mark]:
        """Start copying pinned memory; return the destination, and a mark behind the copy.

        The caching allocator makes no call to CUDA in steady state.
        """
        if destination is None:
            destination = source.to(self._device, non_blocking=True)
        else:
            destination.copy_(source, non_blocking=True)
        return destination, self._mark()

    def fetch(self, source: Tensor, destination: Tensor) -> Mark:
        """Start copying from the GPU to pinned bytes, and return a mark behind the copy."""
        destination.copy_(source, non_blocking=True)
        return self._mark()

    def _mark(self) -> Mark:
        mark: Mark = torch.cuda.current_stream(self._device).record_event()
        return mark


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # uint8
    copied: Mark | None = None  # mark behind the last copy out of the buffer


class Fetch:
    """Bytes of the GPU on their way to the host."""

    def __init__(self, results: Tensor, mark: Mark, earlier: Sequence[_Buffer]) -> None:
        """`earlier` are buffers whose last copies began before this one."""
        self._results = results
        self._mark = mark
        self._earlier = [(buffer, buffer.copied) for buffer in earlier]

    def wait(self) -> Tensor:
        """Return the bytes, once all work before their copy is done.

        They are valid until the next fetch but one.
        """
        self._mark.synchronize()
        for buffer, copied in self._earlier:
            if buffer.copied is copied:  # else it is in use again
                buffer.copied = None
        return self._results


class Staging:
    """Uploads batches, one after the other, and fetches results. For one stream of work."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._buffers = [_Buffer(copies.pinned(0)) for _ in range(_NUM_BUFFERS)]
        self._results = [copies.pinned(0) for _ in range(_NUM_BUFFERS)]

    def upload(self, batch: Batch) -> Batch:
        """Return the batch on the GPU, and its cargo beside it. The copy may still be in progress.

        The batch's own tensors may be overwritten as soon as this returns.
        """
        attention, cargo, states = batch.attention, batch.cargo, batch.state_tables
        tensors = [
            batch.token_ids,
            batch.positions,
            batch.sampled_rows,
            attention.slot_mapping,
            attention.query_start,
            attention.context_lens,
            attention.block_tables,
        ]
        if states is not None:
            tensors += [states.blocks, states.kept_after]
        there = self.send(tensors if cargo is None else [*tensors, *cargo.tensors])
        token_ids, positions, sampled_rows, slots, starts, lens, tables, *others = there
        if states is not None:
            blocks, kept_after, *others = others
            states = StateTables(blocks, kept_after)
        if cargo is not None:
            cargo.arrived = others
        return replace(
            batch,
            token_ids=token_ids,
            positions=positions,
            sampled_rows=sampled_rows,
            state_tables=states,
            attention=replace(
                attention,
                query_start=starts,
                context_lens=lens,
                block_tables=tables,
                slot_mapping=slots,
                on_host=attention,
            ),
        )

    def send(self, tensors: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        """Copy tensors to the GPU, one behind the other.

        Args:
            tensors: on the host; they may be overwritten as soon as this returns.
            memory: where to put them: uint8 on the GPU, with room for them; None for new memory.

        Returns:
            The tensors on the GPU. The copy may still be in progress.
        """
        packing = Packing.of(tensors)
        size = packing.num_bytes
        buffer = self._next(size)
        for view, tensor in zip(packing.views(buffer.memory), tensors, strict=True):
            view.copy_(tensor)
        there, buffer.copied = self._copies.start(
            buffer.memory[:size], None if memory is None else memory[:size]
        )
        return packing.views(there)

    def fetch(self, source: Tensor) -> Fetch:
        """Begin to copy bytes of the GPU to the host, behind all that has been launched so far."""
        if len(self._results[0]) < source.nbytes:
            self._results[0] = self._copies.pinned(2 * source.nbytes)
        memory = self._results.pop(0)
        self._results.append(memory)
        results = memory[: source.nbytes]
        return Fetch(results, self._copies.fetch(source, results), self._buffers)

    def bring(self, source: Tensor, destination: Tensor) -> Mark:
        """Begin to copy to pinned memory of the caller's; return a mark behind the copy."""
        return self._copies.fetch(source, destination)

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
