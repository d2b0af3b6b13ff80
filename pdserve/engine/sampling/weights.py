"""Probabilities relative to that of the most likely token, rounded identically on every device.

A weight is a multiple of 2**-34 in [0, 1], so the sum of a whole vocabulary is exact in float64, in
any order. Thresholds, running sums, and so the sampled token, are then independent of how the work
is divided. csrc/sampling/exp2.h does the same operations, line by line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.protocol import SamplingParams

# 2**x for x in [-0.5, 0.5], highest power first, to about one unit in the last place.
_COEFFICIENTS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_UNITS_BELOW = 2.0**-11  # a float32 in [2**-11, 1] is always a multiple of 2**-34


def relative_weights(logits: Tensor, peaks: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights at each row's temperature: [num_rows, vocab_size] float32.

    Args:
        logits: [num_rows, vocab_size] float32.
        peaks: [num_rows], the largest logit of each row, finite.
        params: one per row, none of them greedy.
    """
    smallest = float(np.finfo(np.float32).tiny)
    scales = logits.new_tensor([math.log2(math.e) / p.temperature for p in params])
    x = (logits - peaks[:, None]).mul_(scales.clamp_(min=smallest)[:, None])
    return _to_units(_exp2(x.clamp_(min=-126.0)))


def _exp2(x: Tensor) -> Tensor:
    """Return 2**x for x in [-126, 0]."""
    exponent = x.round()
    fraction = x - exponent
    power = torch.full_like(x, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        power.mul_(fraction).add_(coefficient)  # two roundings; a fused multiply-add would differ
    return power.mul_(((exponent.int() + 127) << 23).view(torch.float32))


def _to_units(x: Tensor) -> Tensor:
    rounded = (x + _UNITS_BELOW) - _UNITS_BELOW
    return torch.where(x < _UNITS_BELOW, rounded, x)
