"""Fits `StepCosts` to measured steps, by least squares of the relative error.

All costs are at least 0, and the knots are fitted as increments, so they ascend: a larger step is
never predicted to be faster, whatever was measured (non-negative least squares, Lawson and Hanson
1974). On a machine that does other work as well, some measurements are always off. So outliers
count less (Huber's weights), and a bend in the line needs the support of more than one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts

Floats = NDArray[np.float64]
Sample = tuple[StepShape, float]  # a step and the seconds that it took

_ROUNDS = 5  # of updating the samples' weights
# Penalty for a bend, relative to a step's own error, per relative spread of the samples: exact
# measurements may bend the line freely.
_STRAIGHTEN = 20.0
_MOST_STRAIGHTENED = 2.0
_HUBER = 1.345  # standard deviations from which on a sample counts less
_LEAST_SPREAD = 1e-3  # of relative errors, to avoid a division by 0 for a perfect fit


def token_ladder(most: int) -> list[int]:
    """Token counts at which knots may be: 1, 2, 4, 8, 12, 16, 24, 32, ..., and `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    between = [power * 3 // 2 for power in powers if power >= 8]
    return sorted(rung for rung in {*powers, *between, most} if rung <= most)


# Noise may attribute all of a short step to the other terms, but no step takes no time.
LEAST_STEP_S = 1e-6


def fit_costs(samples: Sequence[Sample], *, of_means: bool = False) -> StepCosts:
    """The costs that fit best. Needs at least one sample, with tokens and time above 0.

    Knots are placed at measured token counts only, about two per doubling. With `of_means`, costs
    lie between those of a typical step and of the average one: slow steps count more than without,
    but outliers among them still less than in full.
    """
    knots = _knots([shape.num_tokens for shape, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])  # [num_samples]
    terms = _terms([shape for shape, _ in samples], knots)  # [num_samples, num_costs]
    relative = terms / seconds[:, None]  # predicts 1 everywhere for a perfect fit
    weights = np.ones(len(samples))
    straight = np.zeros((0, terms.shape[1]))  # penalties for bends; none in the first round
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
    for _ in range(_ROUNDS * of_means):
        expected_s = np.maximum(terms @ costs, LEAST_STEP_S)
        off = np.abs(seconds / expected_s - 1)
        spread = max(_LEAST_SPREAD, 1.4826 * float(np.median(off)))
        root = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(off, 1e-12)))
        costs = non_negative_least_squares(
            np.vstack([terms * (root / expected_s)[:, None], straight]),
            np.concatenate([root * seconds / expected_s, np.zeros(len(straight))]),
        )
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
    """The x >= 0 that minimises |a x - b|.

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
    is_free = np.zeros(num_columns, dtype=bool)  # not fixed at 0
    for _ in range(3 * num_columns):  # converges; the bound is for rounding errors
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
    """Least squares over the free columns; a column that would become negative is fixed at 0."""
    while True:
        solved = np.zeros_like(x)
        solved[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        below = is_free & (solved <= 0)
        if not below.any():
            return solved
        # Move towards the solution as far as all columns stay at 0 or above.
        steps = x[below] / np.maximum(x[below] - solved[below], 1e-300)
        x = np.maximum(x + steps.min() * (solved - x), 0.0)
        is_free &= x > 1e-14


def _bends(knots: Sequence[int], costs: Floats) -> Floats:
    """How much the line bends at each inner knot: [len(knots) - 2, num_costs].

    The bend is the distance to a straight line through the neighbours, relative to the seconds at
    the knot.
    """
    widths = np.diff(np.array(knots, dtype=np.float64))
    seconds = np.cumsum(costs[: len(knots)])
    bends = np.zeros((max(0, len(knots) - 2), len(costs)))
    for row, (left, right) in enumerate(pairwise(widths)):
        off = left * right / (left + right) / max(seconds[row + 1], 1e-12)
        bends[row, row + 1], bends[row, row + 2] = off / left, -off / right
    return bends


def _knots(measured: Sequence[int]) -> list[int]:
    """For each rung of the ladder, the largest measured count up to it."""
    counts = sorted(set(measured))
    rungs = token_ladder(counts[-1])
    return sorted({max((c for c in counts if c <= rung), default=counts[0]) for rung in rungs})


def _terms(shapes: Sequence[StepShape], knots: Sequence[int]) -> Floats:
    """How much of each cost each step has: [num_shapes, len(knots) + 3].

    The first column is for the first knot. The next ones are the share of each segment that is
    below the step's tokens; for the last segment it may exceed 1.
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
