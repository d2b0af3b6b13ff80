"""Copies to a GPU that is none, each as late as CUDA may make it: when somebody waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LateCopy:
    """As Mark: the bytes are read only now."""

    source: Tensor
    destination: Tensor
    is_done: bool = False

    def synchronize(self) -> None:
        if not self.is_done:
            self.destination.copy_(self.source)
            self.is_done = True


class LateCopies:
    """As HostCopies."""

    def __init__(self) -> None:
        self.started: list[LateCopy] = []
        self.num_pinned = 0

    def pinned(self, num_bytes: int) -> Tensor:
        self.num_pinned += 1
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def start(self, source: Tensor) -> tuple[Tensor, LateCopy]:
        copy = LateCopy(source, torch.full_like(source, 0x55))
        self.started.append(copy)
        return copy.destination, copy

    def finish(self) -> None:
        """What a GPU does when it comes to it."""
        for copy in self.started:
            copy.synchronize()


class PromptCopies(LateCopies):
    """The same, for those who compute with the result at once."""

    def start(self, source: Tensor) -> tuple[Tensor, LateCopy]:
        destination, copy = super().start(source)
        copy.synchronize()
        return destination, copy
