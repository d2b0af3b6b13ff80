"""Copies to and from a GPU that is none, each as late as CUDA may make it: when somebody waits."""

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
    num_waits: int = 0

    def synchronize(self) -> None:
        self.num_waits += 1
        self.finish()

    def finish(self) -> None:
        if not self.is_done:
            self.destination.copy_(self.source)
            self.is_done = True


class LateCopies:
    """As HostCopies."""

    def __init__(self) -> None:
        self.started: list[LateCopy] = []
        self.fetched: list[LateCopy] = []
        self.num_pinned = 0
        self._pinned: list[Tensor] = []

    def pinned(self, num_bytes: int) -> Tensor:
        self.num_pinned += 1
        self._pinned.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self._pinned[-1]

    def is_pinned(self, argument: object) -> bool:
        """Whether it is a tensor in memory that is pinned."""
        places = {memory.untyped_storage().data_ptr() for memory in self._pinned}
        return isinstance(argument, Tensor) and argument.untyped_storage().data_ptr() in places

    @property
    def num_waits(self) -> int:
        """How often somebody waited for a copy."""
        return sum(copy.num_waits for copy in [*self.started, *self.fetched])

    def forget(self) -> None:
        """Forget the copies so far, all of which are done."""
        self.started.clear()
        self.fetched.clear()

    def start(self, source: Tensor, destination: Tensor | None) -> tuple[Tensor, LateCopy]:
        if destination is None:
            destination = torch.full_like(source, 0x55)
        copy = LateCopy(source, destination)
        self.started.append(copy)
        return destination, copy

    def fetch(self, source: Tensor, destination: Tensor) -> LateCopy:
        destination.fill_(0x55)
        self.fetched.append(LateCopy(source, destination))
        return self.fetched[-1]

    def finish(self) -> None:
        """What a GPU does when it comes to it."""
        for copy in self.started:
            copy.finish()


class PromptCopies(LateCopies):
    """The same, for those who compute with the result at once."""

    def start(self, source: Tensor, destination: Tensor | None) -> tuple[Tensor, LateCopy]:
        destination, copy = super().start(source, destination)
        copy.finish()
        return destination, copy
