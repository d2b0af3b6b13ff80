"""What the ranks of a model compute together, and tell each other, where torch computes it.

Every rank makes the same calls in the same order. (On CPUs the native decoder has its own:
csrc/ranks.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from torch import Tensor

from pdserve.engine.ranks.shard import WHOLE, Shard


class Collectives(Protocol):
    """The calls. On a GPU they are launched like kernels, and CUDA graphs capture them."""

    @property
    def shard(self) -> Shard:
        """The rank that this is."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor the sum over the ranks of the stage, in place; returns it.

        All ranks get the same bits.

        Raises:
            NodeSick: another rank has ended.
        """

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the contiguous tensors of the ranks of the stage, of one shape, in order.

        On its rank 0; the others get an empty list. Raises as all_reduce.
        """

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor that of the stage's rank 0, in place; returns it.

        Raises as all_reduce.
        """

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, and wait for it. Raises as all_reduce."""

    def agree(self, what: str, choose: Callable[[], str]) -> str:
        """Return what `choose` returns on rank 0 of the first stage, which alone calls it.

        For the start: the others wait on the host, longer than for `largest`. `what` is chosen
        once. Raises as all_reduce.
        """

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor to the same rank of the next stage; that of the last: the first.

        Of several stages only. Raises as all_reduce.
        """

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor with what the same rank of the stage before sends; returns it.

        Of several stages only. Raises as all_reduce.
        """


class Alone:
    """Collectives of one rank."""

    shard = WHOLE

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor the sum over the ranks of the stage, in place; returns it."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the contiguous tensors of the ranks of the stage, of one shape, in order."""
        return [tensor]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor that of the stage's rank 0, in place; returns it."""
        return tensor

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, and wait for it."""
        return number

    def agree(self, what: str, choose: Callable[[], str]) -> str:
        """Return what `choose` returns on rank 0 of the first stage, which alone calls it."""
        return choose()

    def send(self, tensor: Tensor) -> None:
        """There is no other stage."""
        raise AssertionError("one stage has nobody to send to")

    def receive(self, tensor: Tensor) -> Tensor:
        """There is no other stage."""
        raise AssertionError("one stage has nobody to receive from")


ALONE: Final = Alone()
