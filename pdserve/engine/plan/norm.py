"""A vector of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight of an RMSNorm, or another vector."""

    tensor: str  # in the checkpoint, [size]
    size: int
    num_heads: int = 0  # of the rank, which it normalises; 0: it is no heads' norm
    is_of_all_heads: bool = False  # it has a number for each dimension of all; else of each
    offset: float = 0.0  # added to the tensor
    is_wide: bool = False  # float32, whatever the type of activations
    cut: tuple[slice, ...] = ()  # of the tensor, that the rank has; (): all of it
    stored: tuple[int, ...] = ()  # its shape in files; (): [size]
    order: tuple[int, ...] = ()  # which of the file's numbers each one is; (): they are in order

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.stored or (self.size,)
