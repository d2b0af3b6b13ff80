"""What is assumed of a node that has not measured how far its profile is off."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.loads.ratios import Ratios

SLOTS = 70  # more than there is room for at first


@given(
    reports=st.lists(
        st.tuples(
            st.integers(0, SLOTS - 1),
            st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0]),
            st.sampled_from(["report", "forget", "other row"]),
        ),
        max_size=40,
    )
)
def test_it_is_the_median_of_equal_nodes(reports: list[tuple[int, float, str]]) -> None:
    ratios, rows, known = Ratios(), np.zeros(2 * SLOTS, np.int64), dict[int, float]()
    for slot, ratio, what in reports:
        ratios.reserve(slot)
        if what == "forget":
            ratios.forget(slot)
            known.pop(slot, None)
            continue
        if what == "other row":
            rows[slot] = 1 - rows[slot]
            ratios.forget_typical()
        ratios.report(slot, ratio, rows[: ratios.capacity])
        known.pop(slot, None)
        equals = [known[other] for other in known if rows[other] == rows[slot]]
        expected = ratio or (float(np.median(equals)) if equals else 1.0)
        if ratio:
            known[slot] = ratio
        assert ratios.values[slot] == expected


def test_new_slots_have_a_ratio_of_one() -> None:
    ratios = Ratios()
    ratios.reserve(SLOTS)
    assert ratios.values.tolist() == [1.0] * ratios.capacity
