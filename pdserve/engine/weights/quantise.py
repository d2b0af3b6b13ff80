"""Rounds weights to 4 bits: 32 of a row share a scale and a minimum, with the least squared error.

Of a group, the codes of a plain range are tried, and those of ranges that cut off its ends. Each
try's scale and minimum are then those that fit its codes best (least squares). Large weights count
more: they are multiplied by large inputs more often than not. There is no calibration data.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pdserve.model_files.coding import Codes, Coding

# Shares of a group's range that 15 steps span.
_SPANS: Final = (1.0, 0.9, 0.8)
_ROWS_BYTES: Final = 4 << 20  # of float32, at a time: what caches hold
_LEAST: Final = 2.0**-24  # a scale in float16, but for 0
_TINY: Final = 1e-30


def quantised(weight: Tensor, coding: Coding) -> Codes:
    """Return codes of weights [rows, inputs], which are finite: whole groups of the coding."""
    rows = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    starts = range(0, len(weight), rows)
    parts = [_quantised(weight[start : start + rows].float(), coding) for start in starts]
    codes, scales, minimums = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    return Codes(coding, codes, scales, minimums)


def _quantised(weight: Tensor, coding: Coding) -> tuple[Tensor, Tensor, Tensor]:
    # [group, rows, groups]: so sums have one order, and all machines make the same codes.
    groups = weight.reshape(len(weight), -1, coding.group).permute(2, 0, 1).contiguous()
    largest = (1 << coding.bits) - 1
    low, high = groups.amin(0), groups.amax(0)
    importance = groups * groups
    importance += _sum(importance) / coding.group
    total = _sum(importance).clamp_min_(_TINY)
    mean = _sum(importance * groups) / total
    best_error = torch.full_like(low, float("inf"))
    codes = torch.zeros_like(groups)
    scale, minimum = torch.zeros_like(low), torch.zeros_like(low)
    for span in _SPANS:
        middle, step = (low + high) / 2, (high - low) * (span / largest)
        start = middle - step * (largest / 2)
        tried = ((groups - start) / step.clamp_min(_LEAST)).round_().clamp_(0, largest)
        fitted = _fitted(groups, tried, importance, total, mean)
        off = tried * fitted[0] - fitted[1] - groups
        error = _sum(off * off * importance)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        codes = torch.where(is_better, tried, codes)
        scale = torch.where(is_better, fitted[0], scale)
        minimum = torch.where(is_better, fitted[1], minimum)
    return codes.permute(1, 2, 0).flatten(1).byte(), scale.half(), minimum.half()


def _fitted(
    groups: Tensor, codes: Tensor, importance: Tensor, total: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Return scale and minimum, as float16 holds them, with weight ~ scale * code - minimum."""
    weighted = importance * codes
    code_mean = _sum(weighted) / total
    spread = _sum(weighted * codes) - total * (code_mean * code_mean)
    along = _sum(weighted * groups) - total * (code_mean * mean)
    scale = torch.where(spread > 0, along / spread.clamp_min(_TINY), 0.0).half().float()
    return scale, (scale * code_mean - mean).half().float()


def _sum(numbers: Tensor) -> Tensor:
    """Over the first dimension, one after the other."""
    total = numbers[0].clone()
    for each in numbers[1:]:
        total += each
    return total
