"""How long answers are expected to be."""

from __future__ import annotations

from coordinator.routing.lengths import GUESS, TAIL, OutputLengths
from pdserve.protocol import SamplingParams

LONG = SamplingParams(max_tokens=10_000)


def test_answers_are_expected_to_be_as_long_as_the_latest_ones() -> None:
    lengths = OutputLengths()
    assert lengths.expected(LONG) == GUESS
    for _ in range(200):
        lengths.observe(40)
    assert lengths.expected(LONG) == 40
    assert lengths.remaining(LONG, 30) == 10
    assert lengths.remaining(LONG, 400) == 40 * TAIL  # longer than most: it may go on for a while


def test_nobody_gets_more_than_was_asked_for() -> None:
    lengths = OutputLengths()
    assert lengths.expected(SamplingParams(max_tokens=5)) == 5
    assert lengths.remaining(SamplingParams(max_tokens=5), 5) == 1
    assert lengths.expected(SamplingParams(max_tokens=10_000, ignore_eos=True)) == 10_000
