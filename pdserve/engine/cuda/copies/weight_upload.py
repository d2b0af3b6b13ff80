"""Copies weights from mapped files to a GPU: several threads, through pinned memory.

The pages of a mapped file are not pinned, so CUDA itself would copy them once more, by one thread
that takes every page fault. Here each thread reads straight into one of its pinned buffers, while
the GPU copies out of the others.

    mapped file --thread--> pinned buffer --GPU--> weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.cuda.copies.staging import HostCopies, Mark

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class UploadSizes:
    """How much is on its way at a time."""

    num_threads: int = 8  # (An estimate: one reads some 6 GB/s of cached pages; PCIe 5 takes 50.)
    num_buffers: int = 16  # more than threads, so that none waits for the GPU to read its last one
    piece_bytes: int = 4 << 20  # on the GPU; a row of a matrix is not split


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A tensor, or some of its rows, to be copied."""

    source: Tensor  # of a mapped file; it may be broadcast, and be of another dtype
    destination: Tensor  # on the GPU, contiguous

    def pieces(self, max_bytes: int) -> Iterator[WeightCopy]:
        """Cut it into pieces of whole rows: at most `max_bytes`, or one row."""
        source = self.source.expand(self.destination.shape)
        at_once = max(1, max_bytes * len(source) // max(1, self.destination.nbytes))
        sources, destinations = torch.split(source, at_once), torch.split(self.destination, at_once)
        return map(WeightCopy, sources, destinations)


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # uint8, pinned
    copied: Mark | None = None  # mark behind the last copy out of it

    def wait(self) -> None:
        """Wait until it may be overwritten."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


def upload_weights(
    weights: Sequence[WeightCopy],
    copies: HostCopies,
    on_loaded: Callable[[int], None],
    sizes: UploadSizes = UploadSizes(),
) -> None:
    """Copy weights to the GPU, and wait for the end.

    Args:
        weights: to copy; all pieces go at once, so no two may overlap.
        copies: to the GPU.
        on_loaded: called with the bytes of each piece, from this thread; may raise to abort.
        sizes: how much is on its way at a time.
    """
    pieces = [piece for weight in weights for piece in weight.pieces(sizes.piece_bytes)]
    if not pieces:
        return
    largest = max(piece.destination.nbytes for piece in pieces)
    buffers = [_Buffer(copies.pinned(largest)) for _ in range(sizes.num_buffers)]
    idle: SimpleQueue[_Buffer] = SimpleQueue()  # the least recently used one first
    for buffer in buffers:
        idle.put(buffer)

    def copy(piece: WeightCopy) -> int:
        buffer = idle.get()
        try:
            buffer.wait()
            size = piece.destination.nbytes
            staged = buffer.memory[:size].view(piece.destination.dtype)
            staged = staged.view(piece.destination.shape)
            _fill(staged, piece.source)
            _, buffer.copied = copies.start(staged, piece.destination)
        finally:
            idle.put(buffer)
        return size

    threads = ThreadPoolExecutor(sizes.num_threads, thread_name_prefix="weights")
    try:
        for num_bytes in threads.map(copy, pieces):
            on_loaded(num_bytes)
    finally:
        threads.shutdown(cancel_futures=True)
        for buffer in buffers:
            buffer.wait()


def _fill(staged: Tensor, source: Tensor) -> None:
    if source.dtype != staged.dtype:
        staged.copy_(source)
        return
    # By this thread alone: torch would wake a team of threads for each one that copies.
    bits = _BITS[source.itemsize]
    np.copyto(staged.view(bits).numpy(), source.view(bits).numpy())
