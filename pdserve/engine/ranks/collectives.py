"""What the tensor-parallel ranks of a model compute together, where torch computes it.

Every rank makes the same calls in the same order. (On CPUs the native decoder has its own:
csrc/ranks.)
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from pdserve.engine.ranks.shard import WHOLE, Shard


class Collectives(Protocol):
    """The calls. On a GPU they are launched like kernels, and CUDA graphs capture them."""

    @property
    def shard(self) -> Shard:
        """The rank that this is."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor the sum over the ranks, in place; returns it.

        All ranks get the same bits.

        Raises:
            NodeSick: another rank has ended.
        """

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the contiguous tensors of all ranks, of one shape, in order, on rank 0.

        The others get an empty list. Raises as all_reduce.
        """

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers, and wait for it. Raises as all_reduce."""


class Alone:
    """Collectives of one rank."""

    shard = WHOLE

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As Collectives.all_reduce."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As Collectives.gather."""
        return [tensor]

    def largest(self, number: int) -> int:
        """As Collectives.largest."""
        return number


ALONE: Final = Alone()
