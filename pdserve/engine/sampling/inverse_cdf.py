"""From a number in [0, 1) to an index, with given weights: where their running sum exceeds it."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 512
_BELOW_ONE = 1.0 - 2.0**-52


def invert_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row the index that its number falls on.

    Running sums are in float64: over a large vocabulary, those in float32 would lose the unlikely
    tokens. Long rows are summed in blocks first, since only one block needs to be looked into.

    Args:
        weights: [num_rows, width] float32, 0 or more, and somewhere above 0.
        numbers: [num_rows] float64 in [0, 1), multiples of 2**-52.

    Returns:
        [num_rows] int64, indices of weights above 0.
    """
    if weights.shape[1] <= 2 * _BLOCK:
        return _locate(weights.double(), numbers)[0]
    sums = block_sums(weights).double()
    block, inside = _locate(sums, numbers)
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    is_real = ids < weights.shape[1]
    in_block = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)) * is_real
    offset, _ = _locate(in_block.double(), inside)
    return block * _BLOCK + offset


def block_sums(weights: Tensor) -> Tensor:
    """[num_rows, width] -> [num_rows, num_blocks]: sums of 512 columns, the last of the rest.

    Like this, and unlike in one sum, a row adds up in the same order whatever is beside it.
    """
    num_whole = weights.shape[1] // _BLOCK
    whole = weights[:, : num_whole * _BLOCK].view(len(weights), num_whole, _BLOCK)
    sums = whole.sum(dim=-1)
    if num_whole * _BLOCK == weights.shape[1]:
        return sums
    rest = weights[:, num_whole * _BLOCK :].cumsum(dim=-1)[:, -1:]
    return torch.cat((sums, rest), dim=1)


def _locate(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Index per row, and where in [0, 1) between that index's bounds the number lies."""
    cdf = weights.cumsum(dim=-1)
    targets = numbers[:, None] * cdf[:, -1:]  # less than the total, see `uniforms`
    index = torch.searchsorted(cdf, targets, right=True)  # first sum above: weight not 0
    weight = weights.gather(1, index)
    before = cdf.gather(1, index) - weight
    inside = ((targets - before) / weight).clamp(0.0, _BELOW_ONE)
    return index[:, 0], inside[:, 0]
