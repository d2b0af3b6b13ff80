"""Whole lives of clusters, each with faults of its own: seeds, and bugs that some must find.

`python -m tests.lives --seeds 5000` lives more of them, and with `--planted` any of the bugs.
"""

from __future__ import annotations

import pytest

from tests.lives.life import live
from tests.lives.planted import BUGS, planted
from tests.matrix import matrix

QUICK = [name for name, bug in BUGS.items() if bug.seeds]


@pytest.mark.parametrize("first", matrix(range(0, 120, 4), 1))
def test_nothing_goes_wrong(first: int) -> None:
    wrong = {seed: live(seed).wrong for seed in range(first, first + 4)}
    assert not {seed: what for seed, what in wrong.items() if what}


def test_a_seed_is_the_same_life_again() -> None:
    assert live(7).digest == live(7).digest


@pytest.mark.parametrize("name", matrix(QUICK, 1))
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with planted(bug):
        assert any(live(seed).wrong for seed in range(bug.seeds))


def test_those_that_few_lives_show_can_still_be_planted() -> None:
    for bug in BUGS.values():
        with planted(bug):
            pass
