"""How many cores a decode step gets beside prompts."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.rules.cores import Slowdowns, cores_for_decodes


def amdahl(divided: float, num_cores: int) -> Slowdowns:
    """Steps of which this share is divided among the cores; measured on few numbers of them."""
    measured = sorted({1, num_cores // 2, num_cores})
    alone = 1 - divided + divided / num_cores
    return Slowdowns(measured, [(1 - divided + divided / n) / alone for n in measured])


@given(
    num_cores=st.integers(2, 64),
    divided=st.floats(0, 1),
    limit_s=st.floats(0.001, 1) | st.just(inf),
)
def test_the_fewest_that_are_fast_enough_but_never_all(
    num_cores: int, divided: float, limit_s: float
) -> None:
    slowdowns = amdahl(divided, num_cores)

    def step_s(cores: int) -> float:
        return 0.01 * slowdowns.at(cores)

    found = cores_for_decodes(num_cores, step_s, limit_s)
    assert 1 <= found <= num_cores - 1
    assert found == num_cores - 1 or step_s(found) <= limit_s
    assert found == 1 or step_s(found - 1) > limit_s


def test_without_promises_decodes_get_one_core() -> None:
    assert cores_for_decodes(16, lambda cores: 1 / cores, inf) == 1


@given(num_cores=st.integers(2, 64), divided=st.floats(0, 1), cores=st.floats(1, 64))
def test_slowdowns_between_those_measured_follow_amdahls_law(
    num_cores: int, divided: float, cores: float
) -> None:
    cores = min(cores, num_cores)
    expected = (1 - divided + divided / cores) / (1 - divided + divided / num_cores)
    assert amdahl(divided, num_cores).at(cores) == pytest.approx(expected)
    assert Slowdowns.proportional(num_cores).at(cores) == pytest.approx(num_cores / cores)


def test_outside_of_what_was_measured_the_nearest_counts() -> None:
    slowdowns = Slowdowns((1, 4), (3.0, 1.0))
    assert [slowdowns.at(0.5), slowdowns.at(9)] == [3.0, 1.0]
