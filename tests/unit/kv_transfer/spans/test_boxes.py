"""Boxes of layers of which some have windows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.spans.box import KvBox, boxes_from


@given(
    begins=st.lists(st.integers(2, 20), min_size=1, max_size=8),
    end=st.integers(2, 12),
    data=st.data(),
)
def test_boxes_have_of_each_layer_what_it_begins_with(
    begins: list[int], end: int, data: st.DataObject
) -> None:
    """Once each, and nothing else."""
    first = data.draw(st.integers(0, len(begins) - 1))
    last = data.draw(st.integers(first + 1, len(begins)))
    found = np.zeros((len(begins), 20), int)
    for box in boxes_from(KvBox(2, end, first, last, 0, 3), begins):
        assert (box.first_head, box.end_head) == (0, 3)
        found[box.first_layer : box.end_layer, box.begin : box.end] += 1
    expected = np.zeros_like(found)
    for layer in range(first, last):
        expected[layer, begins[layer] : end] = 1
    assert (found == expected).all()


def test_layers_without_a_window_stay_together() -> None:
    boxes = boxes_from(KvBox(0, 100, 0, 6, 0, 1), [80, 80, 0, 0, 80, 0])
    assert [(b.begin, b.end, b.first_layer, b.end_layer) for b in boxes] == [
        (0, 80, 2, 4),
        (0, 80, 5, 6),
        (80, 100, 0, 6),
    ]
