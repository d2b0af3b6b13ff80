"""How many drafts of a model are worth the time: that of its own steps, and of the longer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from pdserve.measured.perf_model import StepShape

MOST: Final = 8  # drafts of a stream; each costs a step of the model
WORTH: Final = 1.03  # times as many tokens a second as without, or there are none
SHARED: Final = 1.2  # times as long a token of a stream without drafts may take for them


class Depth(NamedTuple):
    """Of the best choice."""

    num_drafts: int  # of each stream; 0: none
    gain: float  # times as many tokens a second as without


def best_depth(
    shape: StepShape,
    likely: Sequence[float],
    step_s: Callable[[StepShape], float],
    draft_s: Callable[[int], float],
    limit_s: float,
) -> Depth:
    """Return how many drafts of each stream give the most tokens a second.

    Args:
        shape: of the step without drafts.
        likely: of each stream that may have drafts, how likely one is right if those before are.
        step_s: predicted time of a step.
        draft_s: number of drafts of each stream |-> predicted time of drafting them.
        limit_s: that no token may take longer for them.
    """
    plain_s, num_streams = step_s(shape), shape.num_sampled
    if len(likely) < num_streams:  # who gains nothing does not pay for who does
        limit_s = min(limit_s, SHARED * plain_s)
    tokens, best = float(num_streams), Depth(0, 1.0)
    for number in range(1, MOST + 1 if likely else 1):
        tokens += sum(right**number for right in likely)
        seconds = step_s(larger(shape, number * len(likely))) + draft_s(number)
        if seconds > limit_s:
            break
        gain = tokens / seconds * plain_s / num_streams
        if gain > max(WORTH, best.gain):
            best = Depth(number, gain)
    return best


def larger(shape: StepShape, num_drafts: int) -> StepShape:
    """Return the shape of a step of decodes with so many drafts."""
    return replace(
        shape,
        num_tokens=shape.num_tokens + num_drafts,
        num_sampled=shape.num_sampled + num_drafts,
        decode_context=shape.decode_context + num_drafts,
    )
