"""Checks that weights are finite, before anything is computed with them.

One NaN makes every answer whose tokens need it fail, and only those: so nobody would notice at the
start.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pdserve.engine.weights.stored.tensors import ScaledTensor, StoredTensor
from pdserve.model_files.coding import Codes
from pdserve.shared.errors import ModelError


def check_finite(tensors: Mapping[str, Tensor], first_row: int = 0) -> None:
    """Check the weights of a model, or a part of them.

    A sum is finite only if all elements are, and reads them at the speed of memory. It may overflow
    nevertheless, so only then each element is looked at. One transfer from the device is enough.

    Args:
        tensors: name |-> weights, all on one device, of any shape and floating dtype.
        first_row: of the named tensors, if these are parts.

    Raises:
        ModelError: a value is a NaN or an infinity; names the tensor and the row.
    """
    if not tensors:
        return
    sums = torch.stack([tensor.sum().float() for tensor in tensors.values()])
    for (name, tensor), is_finite in zip(tensors.items(), sums.isfinite().tolist(), strict=True):
        if not is_finite:
            _look_at_each(name, tensor, first_row)


def check_scales(tensors: Mapping[str, StoredTensor]) -> None:
    """Check scales, norms and biases, before anything is decoded. Raises as check_finite."""
    for name, stored in tensors.items():
        if len(stored.shape) == 1:
            check_finite({name: stored[()]})
        elif isinstance(stored, ScaledTensor) and (row := stored.bad_row()) is not None:
            raise _damaged(name, f"row {row}")


def check_codes(name: str, codes: Codes, first_row: int = 0) -> None:
    """Check the scales and minimums of codes likewise; `first_row`: of the named tensor."""
    tensors = [torch.from_numpy(numbers) for numbers in codes.numbers]
    for numbers in tensors:
        check_finite({name: numbers}, first_row)


def _look_at_each(name: str, tensor: Tensor, first_row: int) -> None:
    for number, row in enumerate(tensor, first_row):
        if not row.isfinite().all():
            raise _damaged(name, f"row {number}" if row.ndim else f"element {number}")


def _damaged(name: str, where: str) -> ModelError:
    return ModelError(
        f"{name} holds a NaN or an infinity in {where}: the weights are damaged, fetch them again"
    )
