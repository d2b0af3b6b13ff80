"""Rounds weights to 4 bits: 32 of a row share a scale and a minimum, with the least squared error.

Both are integers times a number that 256 weights of the row share, and so is every weight: of 8
bits. Of a group, some scales are tried: that of its plain range, and those of ranges that cut off
its ends, with the minimum that fits their codes best. Large weights count more: they are multiplied
by large inputs more often than not. There is no calibration data.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pdserve.model_files.coding import SUPER_INPUTS, Codes, Coding, ScaleType

# Scales that are tried, beside the largest below that of the plain range.
_BESIDE: Final = (1, 0, -1)
_FITS: Final = 2  # of a minimum to codes
_LARGEST: Final = 120  # of 256 weights, as an integer: 15 times 8, and half of 15 times 16
_MOST: Final = 127
_ROWS_BYTES: Final = 4 << 20  # of float32, at a time: what caches hold
_LEAST: Final = 2.0**-24  # a float16, but for 0


def quantised(weight: Tensor, coding: Coding) -> Codes:
    """Return nested codes of weights [rows, inputs], which are finite: whole groups of these."""
    assert coding.scale is ScaleType.NESTED, "as planned"
    rows = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    starts = range(0, len(weight), rows)
    parts = [_quantised(weight[start : start + rows].float(), coding) for start in starts]
    codes, scales, minimums, supers = (
        torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True)
    )
    return Codes(coding, codes, scales, minimums, supers)


def _quantised(weight: Tensor, coding: Coding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    supers = _supers(weight)
    # [group, rows, groups]: so sums have one order, and all machines make the same codes.
    groups = weight.reshape(len(weight), -1, coding.group).permute(2, 0, 1).contiguous()
    shares = torch.arange(groups.shape[2]) * coding.group // SUPER_INPUTS
    groups /= supers.float().clamp_min_(_LEAST)[:, shares]
    low, high = groups.amin(0), groups.amax(0)
    importance = groups * groups
    importance += _sum(importance) / coding.group
    total = _sum(importance).clamp_min_(_LEAST)
    largest = (1 << coding.bits) - 1
    below = ((high - low) / largest).floor_()
    best_error = torch.full_like(low, float("inf"))
    codes = torch.zeros_like(groups)
    scale, start = torch.ones_like(low), torch.zeros_like(low)
    for beside in _BESIDE:
        tried = (below + beside).clamp_(1, 2 * _LARGEST // largest)
        least = (low + high - tried * largest) / 2
        for _ in range(_FITS):
            found = ((groups - least) / tried).round_().clamp_(0, largest)
            least = _sum((groups - found * tried) * importance) / total
        least = least.round_().clamp_(-_MOST, _MOST)
        most = ((_MOST - least) / tried).floor_().clamp_(0, largest)
        found = ((groups - least) / tried).round_().clamp_min_(0).minimum(most)
        off = found * tried + least - groups
        error = _sum(off * off * importance)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        codes = torch.where(is_better, found, codes)
        scale, start = torch.where(is_better, tried, scale), torch.where(is_better, least, start)
    return codes.permute(1, 2, 0).flatten(1).byte(), scale.char(), (-start).char(), supers


def _supers(weight: Tensor) -> Tensor:
    """Return what 256 inputs share, [rows, supers] float16: no weight is above 120 times that."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % SUPER_INPUTS))
    wanted = padded.reshape(len(weight), -1, SUPER_INPUTS).abs().amax(2) / _LARGEST
    nearest = wanted.half()
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    return torch.where(nearest.float() < wanted, above, nearest)


def _sum(numbers: Tensor) -> Tensor:
    """Over the first dimension, one after the other."""
    total = numbers[0].clone()
    for each in numbers[1:]:
        total += each
    return total
