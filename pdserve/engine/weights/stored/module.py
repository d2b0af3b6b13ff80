"""The tensors that files have for one quantised matrix, checked where they are taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError

FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32})
INT32: Final = frozenset({torch.int32})
UINT8: Final = frozenset({torch.uint8})
DTYPES: Final = {  # of weights that are not quantised
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix of the model, and the tensors beside it."""

    name: str  # without ".weight"
    shape: tuple[int, int]  # in the model: outputs, inputs
    tensors: Mapping[str, Tensor]  # all of the files
    file_of: Mapping[str, Path]
    used: set[str]  # names of those that have been taken, by any module
    dtype: torch.dtype  # of the model's other weights

    def find(self, suffix: str) -> Tensor | None:
        """A tensor of any type and shape, if there is one."""
        name = f"{self.name}.{suffix}"
        if name in self.tensors:
            self.used.add(name)
        return self.tensors.get(name)

    def take(
        self, suffix: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]
    ) -> Tensor:
        """A tensor of one of these types and shapes.

        Raises:
            MissingTensor: there is none.
            MisshapedTensor: it has another shape.
            ModelError: it has another type.
        """
        tensor = self.find(suffix)
        if tensor is None:
            raise MissingTensor(
                f"{self.name} is quantised, but the files have no {self.name}.{suffix}"
            )
        if tensor.dtype not in dtypes:
            expected = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            found = str(tensor.dtype).removeprefix("torch.")
            raise self.error(suffix, f"is of type {found}; it must be {expected}")
        if shapes and tuple(tensor.shape) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise MisshapedTensor(
                f"{self._of(suffix)} has the shape {list(tensor.shape)}, but config.json and its "
                f"[outputs, inputs] of {list(self.shape)} make it {expected}"
            )
        return tensor

    def error(self, suffix: str, what: str) -> ModelError:
        """Return one that names a tensor and its file."""
        return ModelError(f"{self._of(suffix)} {what}")

    def num_groups(self, scheme: Scheme) -> tuple[int, int]:
        """How many groups of outputs and of inputs there are."""
        rows, columns = scheme.group
        num_out, num_in = self.shape
        return -(-num_out // (rows or num_out)), -(-num_in // (columns or num_in))

    def whole_groups(self, scheme: Scheme) -> tuple[int, int]:
        """As num_groups. Raises MisshapedTensor: the last group of inputs would be a part."""
        size = scheme.group[1] or self.shape[1]
        if self.shape[1] % size:
            raise MisshapedTensor(
                f"{self.name} has {self.shape[1]} inputs, but the group size is {size}, which "
                "must divide them"
            )
        return self.num_groups(scheme)

    @staticmethod
    def shapes_of(groups: tuple[int, int]) -> list[tuple[int, ...]]:
        """The shapes that libraries give to a number for each group."""
        flat: list[tuple[int, ...]] = [(groups[0],)] if groups[1] == 1 else []
        return [groups, *flat, *([()] if groups == (1, 1) else [])]

    def group_order(self, suffix: str, num_groups: int, size: int) -> Tensor | None:
        """The group of each input; None: they are in order.

        Raises:
            ModelError: an input is of a group that there is not.
        """
        if self.find(suffix) is None:
            return None
        num_in = self.shape[1]
        group_of = self.take(suffix, INT32, (num_in,)).long()
        if len(group_of) and not 0 <= int(group_of.min()) <= int(group_of.max()) < num_groups:
            raise self.error(suffix, f"names groups that there are not: there are {num_groups}")
        in_order = torch.arange(num_in) // (size or num_in)
        return None if torch.equal(group_of, in_order) else group_of

    def _of(self, suffix: str) -> str:
        name = f"{self.name}.{suffix}"
        return f"{self.file_of[name]}: {name}" if name in self.file_of else name
