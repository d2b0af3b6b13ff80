"""Plans against a naive oracle that copies token by token, layer by layer, head by head."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given

from kv_transfer.spans.box import BlockRun, KvBox, check_compatible, whole_box
from kv_transfer.spans.plan import (
    Spans,
    _count_rows,
    is_quick,
    plan_spans,
    source_ranges,
    split_box,
)
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import LayoutMismatch
from tests.unit.kv_transfer.pairs import SMALL, make_pool, tokens_of
from tests.unit.kv_transfer.random_plans import NUM_BLOCKS, Plan, copied, in_box, plans


@given(plans())
def test_a_plan_does_what_copying_token_by_token_does(plan: Plan) -> None:
    source, destination, box = plan
    source_pool = make_pool(source.layout, NUM_BLOCKS, seed=3)
    source_pool.data[source_pool.data == 0xEE] = 0
    received = make_pool(destination.layout, NUM_BLOCKS)
    try:
        spans = plan_spans(source, destination, box)
        received.flat[:] = copied(spans, source_pool.flat, received.flat.size)
        table = [0] * source.first_block + source.block_ids.tolist()
        theirs = tokens_of(source_pool, source.layout, table, box.begin, box.end)
        ours = tokens_of(
            received, destination.layout, destination.block_ids.tolist(), box.begin, box.end
        )
        expected = in_box(theirs, source.layout, box)
        np.testing.assert_array_equal(in_box(ours, destination.layout, box), expected)
        # As many bytes have changed as are in the box, so none has outside of it.
        num_bytes = box.num_bytes(source.layout)
        assert spans[:, 2].sum() == num_bytes == expected.size
        assert num_bytes == box.num_bytes(destination.layout)
        assert num_bytes == np.count_nonzero(received.flat != 0xEE)
    finally:
        source_pool.close()
        received.close()


@given(plans())
def test_an_exporter_streams_the_same_bytes_in_the_same_order(plan: Plan) -> None:
    source, destination, box = plan
    ours = plan_spans(source, destination, box)[:, [0, 2]]
    theirs = source_ranges(source, box)
    assert byte_order(ours) == byte_order(theirs)


def test_part_of_a_block_of_a_later_stage_stays_within_its_block() -> None:
    late = SMALL.stage(1, 2)
    run = BlockRun(late, np.array([2]))
    spans = plan_spans(run, run, whole_box(late, 0, late.block_size - 1))
    begin = 2 * late.block_bytes
    assert (spans[:, 0] >= begin).all()
    assert (spans[:, 0] + spans[:, 2] <= begin + late.block_bytes).all()


@given(plans())
def test_rows_are_counted_before_they_are_made(plan: Plan) -> None:
    source, destination, box = plan
    assert len(plan_spans(source, destination, box)) <= _count_rows(
        source.layout, destination.layout, box
    )


@given(plans())
def test_the_parts_of_a_box_are_the_box(plan: Plan) -> None:
    source, destination, box = plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kv_transfer.spans.plan._PART_ROWS", 40)
        parts = split_box(source.layout, destination.layout, box)
    assert (parts[0].begin, parts[-1].end) == (box.begin, box.end)
    for part, following in pairwise(parts):
        assert part.end == following.begin
        assert part.end % source.layout.block_size == 0
    for part in parts:
        assert part == msgspec.structs.replace(box, begin=part.begin, end=part.end)
        assert not part.is_empty
    spans = [plan_spans(source, destination, part) for part in parts]
    whole = plan_spans(source, destination, box)
    assert byte_order(np.concatenate(spans)[:, [0, 2]]) == byte_order(whole[:, [0, 2]])


def test_whole_blocks_are_planned_at_once_and_single_rows_on_a_thread() -> None:
    wider = msgspec.structs.replace(SMALL, block_size=6)
    few, many = whole_box(SMALL, 1, 39), whole_box(SMALL, 1, 20_003)
    assert is_quick(SMALL, SMALL, few)
    assert is_quick(SMALL, SMALL, many)  # two blocks of it are parts
    assert is_quick(SMALL, wider, few)
    assert not is_quick(SMALL, wider, many)
    assert not is_quick(SMALL, SMALL, msgspec.structs.replace(many, end_head=1))


def test_a_plan_of_millions_of_rows_is_refused_and_not_made() -> None:
    large = KvLayout(128, 32, 8, 16, KvDtype.BFLOAT16)
    wider = msgspec.structs.replace(large, block_size=24)
    source, destination = BlockRun(large, np.zeros(3000)), BlockRun(wider, np.zeros(2000))
    with pytest.raises(LayoutMismatch, match="single rows, more than"):
        plan_spans(source, destination, whole_box(large, 0, 48_000))


def byte_order(ranges: Spans) -> list[int]:
    return [byte for offset, nbytes in ranges for byte in range(offset, offset + nbytes)]


@given(plans())
def test_neighbouring_spans_are_joined(plan: Plan) -> None:
    spans = plan_spans(*plan)
    ends = spans[:-1, :2] + spans[:-1, 2:]
    assert not (ends == spans[1:, :2]).all(axis=1).any()


def test_consecutive_whole_blocks_are_one_span() -> None:
    source = BlockRun(SMALL, np.arange(4, 12))
    destination = BlockRun(SMALL, np.arange(20, 28))
    spans = plan_spans(source, destination, whole_box(SMALL, 0, 32))
    size = SMALL.block_bytes
    assert spans.tolist() == [[4 * size, 20 * size, 8 * size]]


def test_scattered_whole_blocks_are_one_span_each() -> None:
    source = BlockRun(SMALL, np.array([9, 2, 5]))
    destination = BlockRun(SMALL, np.array([1, 8, 3]))
    spans = plan_spans(source, destination, whole_box(SMALL, 0, 12))
    assert (spans // SMALL.block_bytes).tolist() == [[9, 1, 1], [2, 8, 1], [5, 3, 1]]


def test_the_layers_of_a_whole_block_are_one_span() -> None:
    run = BlockRun(SMALL, np.array([3, 7]))
    spans = plan_spans(run, BlockRun(SMALL, np.array([5, 2])), KvBox(0, 8, 1, 2, 0, 2))
    block, layer = SMALL.block_bytes, SMALL.layer_bytes
    assert spans.tolist() == [
        [3 * block + layer, 5 * block + layer, layer],
        [7 * block + layer, 2 * block + layer, layer],
    ]


def test_the_heads_of_a_whole_block_are_one_span_a_layer_and_half() -> None:
    source = BlockRun(SMALL, np.array([3]))
    destination = BlockRun(SMALL.shard(1, 2), np.array([0]))
    spans = plan_spans(source, destination, KvBox(0, 4, 0, 2, 1, 2))
    head = SMALL.planes[0].row_bytes * SMALL.block_size
    first = 3 * SMALL.block_bytes
    assert spans.tolist() == [[first + (2 * n + 1) * head, n * head, head] for n in range(4)]


@pytest.mark.parametrize(
    "box", [KvBox(3, 3, 0, 2, 0, 2), KvBox(0, 3, 1, 1, 0, 2), KvBox(0, 3, 0, 2, 2, 1)]
)
def test_an_empty_box_has_no_spans(box: KvBox) -> None:
    run = BlockRun(SMALL, np.array([1]))
    assert plan_spans(run, run, box).shape == (0, 3)
    assert source_ranges(run, box).shape == (0, 2)


@pytest.mark.parametrize(("begin", "end"), [(0, 9), (3, 8), (8, 13)])
def test_a_run_must_cover_the_range(begin: int, end: int) -> None:
    covering = BlockRun(SMALL, np.arange(8))
    short = BlockRun(SMALL, np.array([1, 2]), first_block=1)  # tokens 4..12
    with pytest.raises(ValueError, match=r"tokens .* are not all in blocks for 4\.\.12"):
        plan_spans(short, covering, whole_box(SMALL, begin, end))
    with pytest.raises(ValueError, match=r"tokens .* are not all in blocks for 4\.\.12"):
        plan_spans(covering, short, whole_box(SMALL, begin, end))


@pytest.mark.parametrize(
    ("box", "missing"),
    [
        (KvBox(0, 4, 0, 3, 0, 2), r"layers 0\.\.3 are not all in 0\.\.2"),
        (KvBox(0, 4, -1, 2, 0, 2), r"layers -1\.\.2 are not all in 0\.\.2"),
        (KvBox(0, 4, 0, 2, 0, 3), r"heads 0\.\.3 are not all in 0\.\.2"),
        (KvBox(0, 4, 0, 2, -1, 2), r"heads -1\.\.2 are not all in 0\.\.2"),
    ],
)
def test_a_run_must_have_the_layers_and_heads(box: KvBox, missing: str) -> None:
    run = BlockRun(SMALL, np.array([1]))
    with pytest.raises(ValueError, match=missing):
        plan_spans(run, run, box)


@pytest.mark.parametrize(
    "other",
    [
        KvLayout(3, 2, 8, 4, KvDtype.FLOAT32),
        KvLayout(2, 1, 8, 4, KvDtype.FLOAT32),
        KvLayout(2, 2, 16, 4, KvDtype.FLOAT32),
        KvLayout(2, 2, 8, 4, KvDtype.BFLOAT16),
        KvLayout(2, 2, 8, 4, KvDtype.FLOAT32, is_latent=True),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_both_layouts(other: KvLayout) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(SMALL, other)
    assert SMALL.describe() in str(caught.value)
    assert other.describe() in str(caught.value)


def test_another_block_size_is_compatible() -> None:
    check_compatible(SMALL, KvLayout(2, 2, 8, 64, KvDtype.FLOAT32))
