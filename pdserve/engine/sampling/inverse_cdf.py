"""Inverse CDF sampling: maps a number in [0, 1) to an index, in proportion to given weights."""

from __future__ import annotations

import torch
from torch import Tensor


def invert_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the first index at which the running sum exceeds its scaled number.

    Running sums are exact (`weights.py`), so they depend neither on the order nor on the device.

    Args:
        weights: [num_rows, width] float32, multiples of 2**-34 in [0, 1], not all 0 in any row.
        numbers: [num_rows] float64 in [0, 1), multiples of 2**-52.

    Returns:
        [num_rows] int64, indices of weights above 0.
    """
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = numbers[:, None] * cdf[:, -1:]  # less than the total, see `uniforms`
    return torch.searchsorted(cdf, targets, right=True)[:, 0]  # first sum above: weight not 0
