"""How long answers are expected to be."""

from __future__ import annotations

import pytest

from pdserve.measured.output_lengths import GUESS, TAIL, OutputLengths
from pdserve.protocol import SamplingParams

LONG = SamplingParams(max_tokens=10_000)


def test_answers_are_expected_to_be_as_long_as_the_latest_ones() -> None:
    lengths = OutputLengths()
    assert lengths.remaining(LONG, 0) == GUESS
    for _ in range(200):
        lengths.observe(40)
    assert lengths.remaining(LONG, 0) == pytest.approx(40, abs=0.1)
    assert lengths.remaining(LONG, 30) == pytest.approx(10, abs=0.1)


def test_the_guess_counts_as_one_answer() -> None:
    lengths = OutputLengths(100.0)
    for _ in range(3):
        lengths.observe(20)
    assert lengths.mean_tokens == pytest.approx((100 + 3 * 20) / 4)


def test_an_answer_longer_than_usual_is_expected_to_go_on() -> None:
    assert OutputLengths(100.0).remaining(LONG, 10) == 90.0
    assert OutputLengths(100.0).remaining(LONG, 500) == TAIL * 100


def test_nobody_is_expected_to_get_more_than_was_asked_for() -> None:
    lengths = OutputLengths(100.0)
    assert lengths.remaining(SamplingParams(max_tokens=5), 0) == 5
    assert lengths.remaining(SamplingParams(max_tokens=1000), 990) == 10
    assert lengths.remaining(SamplingParams(max_tokens=5), 6) == 0
    assert lengths.remaining(SamplingParams(max_tokens=10_000, ignore_eos=True), 0) == 10_000
