"""Tensors that are rows of others in the files: any part of one is what it is of the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.models.rope_config import RopeConfig, RopeType
from pdserve.engine.plan.matrix import TensorRows
from pdserve.engine.weights.opening import SomeRows

HEAD_DIM, NUM_HEADS, FIRST = 12, 3, 5


@given(
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.booleans(),
    st.integers(0, 36),
    st.integers(0, 36),
    st.slices(4),
)
def test_any_part(share: float, is_interleaved: bool, one: int, other: int, columns: slice) -> None:
    rope = RopeConfig(RopeType.DEFAULT, 1e4, 64, rotated_share=share, is_interleaved=is_interleaved)
    order = rope.head_order(HEAD_DIM)
    num_rows = NUM_HEADS * HEAD_DIM
    whole = torch.randn(FIRST + num_rows + 2, 4)
    part = SomeRows(whole, TensorRows("fused", FIRST, order), (num_rows, 4))
    own = whole[FIRST : FIRST + num_rows].view(NUM_HEADS, HEAD_DIM, 4)
    in_order = own[:, list(order)] if order else own
    expected = in_order.reshape(num_rows, 4)
    rows, columns = slice(*sorted((one, other))), slice(columns.start, columns.stop)
    for cut in ((rows, columns), (rows,), ()):
        assert torch.equal(part[cut], expected[cut])
    bias = SomeRows(whole[:, 0], TensorRows("fused", FIRST, order), (num_rows,))
    assert torch.equal(bias[rows], expected[rows, 0])


@given(st.sampled_from([1.0, 0.75, 0.5]), st.booleans())
def test_an_order_pairs_what_is_rotated_together(share: float, is_interleaved: bool) -> None:
    rope = RopeConfig(RopeType.DEFAULT, 1e4, 64, rotated_share=share, is_interleaved=is_interleaved)
    order, dims = rope.head_order(16) or tuple(range(16)), rope.rotated_dims(16)
    assert sorted(order) == list(range(16))
    pairs = list(zip(order[:8], order[8:], strict=True))[: dims // 2]
    distance = 1 if is_interleaved else dims // 2
    assert {second - first for first, second in pairs} == {distance}
    assert sorted(sum(pairs, ())) == list(range(dims))
