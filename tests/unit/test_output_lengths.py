"""How long answers are expected to be."""

from __future__ import annotations

import random

import pytest

from pdserve.measured import output_lengths
from pdserve.measured.output_lengths import (
    GUESS,
    TAIL,
    Kind,
    OutputLengths,
    kind_of,
    remaining,
)
from pdserve.protocol import SamplingParams

LONG = SamplingParams(max_tokens=10_000)
CHAT, CODE = ("chat", "", ""), ("code", "", "")


def of(kind: Kind, *answers: int) -> OutputLengths:
    """What is known after these answers of one kind."""
    lengths = OutputLengths()
    for num_tokens in answers:
        lengths.observe(num_tokens, kind)
    return lengths


def test_answers_are_expected_to_be_as_long_as_the_latest_ones() -> None:
    assert of(()).expected(()) == GUESS
    assert of((), *[40] * 200).expected(()) == pytest.approx(40, abs=0.1)


def test_the_guess_counts_as_one_answer() -> None:
    lengths = OutputLengths(100.0)
    for _ in range(3):
        lengths.observe(20)
    assert lengths.mean_tokens == pytest.approx((100 + 3 * 20) / 4)


def test_an_answer_longer_than_usual_is_expected_to_go_on() -> None:
    assert remaining(100.0, LONG, 10) == 90.0
    assert remaining(100.0, LONG, 500) == TAIL * 100


def test_nobody_is_expected_to_get_more_than_was_asked_for() -> None:
    assert remaining(100.0, SamplingParams(max_tokens=5), 0) == 5
    assert remaining(100.0, SamplingParams(max_tokens=1000), 990) == 10
    assert remaining(100.0, SamplingParams(max_tokens=5), 6) == 0
    exact = SamplingParams(max_tokens=10_000, ignore_eos=True)
    assert remaining(100.0, exact, 0) == 10_000


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (kind_of(CHAT, 500, []), kind_of(CODE, 500, [])),  # class, tenant or adapter
        (kind_of(CHAT, 500, []), kind_of(CHAT, 900, [])),
        (kind_of(CHAT, 500, [1]), kind_of(CHAT, 500, [2])),  # what it begins with
        (kind_of(CHAT, 500, [1, 3]), kind_of(CHAT, 500, [1, 4])),
        (kind_of(CHAT, 500, [1]), kind_of(CHAT, 900, [1])),  # all begin alike
    ],
    ids=["sender", "size", "beginning", "longer beginning", "size and beginning"],
)
def test_each_kind_has_its_own_length(short: Kind, long: Kind) -> None:
    lengths = OutputLengths()
    for _ in range(40):
        lengths.observe(10, short)
        lengths.observe(400, long)
    assert lengths.expected(short) == pytest.approx(10, abs=15)
    assert lengths.expected(long) == pytest.approx(400, abs=15)
    assert 100 < lengths.expected(()) < 300
    assert lengths.off_tokens["kind"] < 0.3 * lengths.off_tokens["mean"]


def test_a_kind_that_is_new_has_the_length_of_the_wider_one() -> None:
    lengths = of(kind_of(CHAT, 500, [1]), *[40] * 100)
    assert lengths.expected(kind_of(CHAT, 500, [2])) == pytest.approx(40, abs=2)
    lengths.observe(400, kind_of(CHAT, 500, [2]))
    assert 100 < lengths.expected(kind_of(CHAT, 500, [2])) < 400, "one answer may be an exception"


def test_what_the_answer_may_have_said_is_no_beginning() -> None:
    """A request that goes on has its output behind its prompt."""
    assert kind_of(CHAT, 100, [1, 2]) == kind_of(CHAT, 100, [1])


def test_kinds_that_were_not_met_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lengths, "MOST_KINDS", 50)
    lengths, all_alike = OutputLengths(), kind_of(CHAT, 500, [])
    once, often = kind_of(CHAT, 500, [1]), kind_of(CHAT, 500, [2])
    lengths.observe(4000, once)
    for number in range(100):
        lengths.observe(10, kind_of(CHAT, 500, [10 + number]))
        if number % 10 == 0:
            lengths.observe(2000, often)
    assert lengths.expected(once) == lengths.expected(all_alike)
    assert lengths.expected(often) > lengths.expected(all_alike) + 500, "it was met now and then"
    assert len(lengths._by_kind) == 50


def test_a_kind_costs_little_where_it_says_nothing() -> None:
    """Lengths that do not depend on the kind: the noise of many small means stays small."""
    lengths, draw = OutputLengths(), random.Random(1)
    for _ in range(3000):
        kind = kind_of(CHAT, draw.randint(1, 4000), [draw.randint(1, 50)])
        lengths.observe(round(draw.lognormvariate(5, 0.8)), kind)
    assert lengths.off_tokens["kind"] < 1.1 * lengths.off_tokens["mean"]
