"""From a number in [0, 1) to an index, with given weights: where their running sum exceeds it."""

from __future__ import annotations

import torch
from torch import Tensor


def invert_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row the index that its number falls on.

    Running sums are exact (`weights.py`), so they hang on neither the order nor the device.

    Args:
        weights: [num_rows, width] float32, multiples of 2**-34 in [0, 1], and somewhere above 0.
        numbers: [num_rows] float64 in [0, 1), multiples of 2**-52.

    Returns:
        [num_rows] int64, indices of weights above 0.
    """
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = numbers[:, None] * cdf[:, -1:]  # less than the total, see `uniforms`
    return torch.searchsorted(cdf, targets, right=True)[:, 0]  # first sum above: weight not 0
