"""From measured steps to `StepCosts`, by least squares of the relative error.

Every cost is held at 0 or above, and the knots are fitted as increments, so they ascend: whatever
was measured, a larger step is never predicted to be faster (non-negative least squares, Lawson and
Hanson 1974). Steps that are far off the others' line count less (Huber's weights), and a bend needs
more than one step's word: on a machine that does other things as well, some are always off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts

Floats = NDArray[np.float64]
Sample = tuple[StepShape, float]  # and the seconds it took

_ROUNDS = 5  # of weighing the samples anew
# What a bend costs, beside a step's own error, for each share that steps are off the line: exact
# measurements may bend it as they like.
_STRAIGHTEN = 20.0
_MOST_STRAIGHTENED = 2.0
_HUBER = 1.345  # standard deviations off at which a sample begins to count less
_LEAST_SPREAD = 1e-3  # of relative errors; a perfect fit has none to divide by


def token_ladder(most: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, ... up to `most`, which is the last: where knots may be."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    between = [power * 3 // 2 for power in powers if power >= 8]
    return sorted(rung for rung in {*powers, *between, most} if rung <= most)


# Noise may put all of a short step into the other terms; no step is done in no time.
LEAST_STEP_S = 1e-6


def fit_costs(samples: Sequence[Sample]) -> StepCosts:
    """The costs that fit best. Needs at least one sample, each of at least a token and some time.

    Knots are put only at token counts that were measured, about two to a doubling.
    """
    knots = _knots([shape.num_tokens for shape, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])  # [num_samples]
    terms = _terms([shape for shape, _ in samples], knots)  # [num_samples, num_costs]
    relative = terms / seconds[:, None]  # predicts 1 everywhere, if it fits
    weights = np.ones(len(samples))
    straight = np.zeros((0, terms.shape[1]))  # what pulls at the knots; nothing in the first round
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        costs = non_negative_least_squares(
            np.vstack([relative * root[:, None], straight]),
            np.concatenate([root, np.zeros(len(straight))]),
        )
        off = np.abs(relative @ costs - 1)
        spread = max(_LEAST_SPREAD, 1.4826 * float(np.median(off)))
        straight = min(_STRAIGHTEN * spread, _MOST_STRAIGHTENED) * _bends(knots, costs)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(off, 1e-12))
    increments, (sampled_s, pair_s, context_s) = costs[:-3], costs[-3:]
    return StepCosts(
        knot_tokens=knots,
        knot_s=np.maximum(np.cumsum(increments), LEAST_STEP_S).tolist(),
        sampled_s=float(sampled_s),
        pair_s=float(pair_s),
        context_s=float(context_s),
    )


def fit_error(costs: StepCosts, samples: Sequence[Sample]) -> float:
    """The mean of |predicted / measured - 1|."""
    perf = PerfModel(costs)
    return sum(abs(perf.step_s(shape) / seconds - 1) for shape, seconds in samples) / len(samples)


def non_negative_least_squares(a: Floats, b: Floats) -> Floats:
    """The x >= 0 with the least |a x - b|.

    Args:
        a: [num_rows, num_columns].
        b: [num_rows].

    Returns:
        [num_columns].
    """
    norms = np.linalg.norm(a, axis=0)
    norms[norms == 0] = 1.0
    a = a / norms
    num_columns = a.shape[1]
    x: Floats = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=bool)  # not held at 0
    for _ in range(3 * num_columns):  # it ends by itself; rounding might make it circle
        gradient = a.T @ (b - a @ x)
        gradient[is_free] = 0.0
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10 * np.linalg.norm(b):
            break
        is_free[best] = True
        x = _freed(a, b, x, is_free)
    x /= norms
    return x


def _freed(a: Floats, b: Floats, x: Floats, is_free: NDArray[np.bool_]) -> Floats:
    """The least squares over the free columns; columns that would go below 0 are held there."""
    while True:
        solved = np.zeros_like(x)
        solved[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        below = is_free & (solved <= 0)
        if not below.any():
            return solved
        # As far towards the solution as all stay at 0 or above.
        steps = x[below] / np.maximum(x[below] - solved[below], 1e-300)
        x = np.maximum(x + steps.min() * (solved - x), 0.0)
        is_free &= x > 1e-14


def _bends(knots: Sequence[int], costs: Floats) -> Floats:
    """[len(knots) - 2, num_costs]: how much the line bends at each inner knot, in shares of the
    seconds there: what a straight line through its neighbours would be off by."""
    widths = np.diff(np.array(knots, dtype=np.float64))
    seconds = np.cumsum(costs[: len(knots)])
    bends = np.zeros((max(0, len(knots) - 2), len(costs)))
    for row, (left, right) in enumerate(pairwise(widths)):
        off = left * right / (left + right) / max(seconds[row + 1], 1e-12)
        bends[row, row + 1], bends[row, row + 2] = off / left, -off / right
    return bends


def _knots(measured: Sequence[int]) -> list[int]:
    """For each rung of the ladder the largest count up to it that was measured."""
    counts = sorted(set(measured))
    rungs = token_ladder(counts[-1])
    return sorted({max((c for c in counts if c <= rung), default=counts[0]) for rung in rungs})


def _terms(shapes: Sequence[StepShape], knots: Sequence[int]) -> Floats:
    """[num_shapes, len(knots) + 3]: what each step has of each cost.

    The first column is the first knot, the next ones how much of each segment lies below the
    step's tokens: beyond 1 behind the last knot.
    """
    tokens = np.array([shape.num_tokens for shape in shapes], dtype=np.float64)
    columns = [np.ones(len(shapes))]
    for low, high in pairwise(knots):
        most = np.inf if high == knots[-1] else 1.0
        columns.append(np.clip((tokens - low) / (high - low), 0.0, most))
    columns.append(np.array([shape.num_sampled for shape in shapes], dtype=np.float64))
    columns.append(np.array([shape.prefill_pairs for shape in shapes], dtype=np.float64))
    columns.append(np.array([shape.decode_context for shape in shapes], dtype=np.float64))
    return np.stack(columns, axis=1)
