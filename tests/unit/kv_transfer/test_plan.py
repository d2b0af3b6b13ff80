"""Plans against a naive oracle that copies token by token, layer by layer, head by head."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import BlockRun, Spans, check_compatible, plan_spans, source_ranges
from pdserve.errors import LayoutMismatch
from pdserve.kv_layout import KvDtype, KvLayout
from tests.unit.kv_transfer.pairs import SMALL, make_pool, tokens_of

NUM_BLOCKS = 40


@st.composite
def plans(draw: st.DrawFn) -> tuple[BlockRun, BlockRun, int, int]:
    """(source, destination, begin, end), the source beginning at any block."""
    small = st.integers(1, 3)
    layers, heads, head_dim = draw(small), draw(small), draw(st.integers(1, 4))
    sizes = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    if draw(st.booleans()):
        sizes = (sizes[0], sizes[0])
    source, destination = (KvLayout(layers, heads, head_dim, n, KvDtype.BFLOAT16) for n in sizes)
    begin = draw(st.integers(0, 20))
    end = begin + draw(st.integers(1, 20))
    first_block = draw(st.integers(0, begin // source.block_size))
    ids = st.permutations(range(NUM_BLOCKS)) | st.just(list(range(NUM_BLOCKS)))
    source_ids = draw(ids)[: source.blocks_for(end) - first_block]
    table = draw(ids)[: destination.blocks_for(end)]
    return (
        BlockRun(source, np.array(source_ids, dtype=np.int64), first_block),
        BlockRun(destination, np.array(table, dtype=np.int64)),
        begin,
        end,
    )


def copied(spans: Spans, source: np.ndarray, destination_bytes: int) -> np.ndarray:
    destination = np.full(destination_bytes, 0xEE, dtype=np.uint8)
    for source_offset, offset, nbytes in spans:
        assert (destination[offset : offset + nbytes] == 0xEE).all(), "a byte is written twice"
        destination[offset : offset + nbytes] = source[source_offset : source_offset + nbytes]
    return destination


@given(plans())
def test_a_plan_does_what_copying_token_by_token_does(
    plan: tuple[BlockRun, BlockRun, int, int],
) -> None:
    source, destination, begin, end = plan
    source_pool = make_pool(source.layout, NUM_BLOCKS, seed=3)
    source_pool.data[source_pool.data == 0xEE] = 0
    received = make_pool(destination.layout, NUM_BLOCKS)
    try:
        spans = plan_spans(source, destination, begin, end)
        received.flat[:] = copied(spans, source_pool.flat, received.flat.size)
        table = [0] * source.first_block + source.block_ids.tolist()
        expected = tokens_of(source_pool, source.layout, table, begin, end)
        found = tokens_of(received, destination.layout, destination.block_ids.tolist(), begin, end)
        np.testing.assert_array_equal(found, expected)
        moved = (end - begin) * source.layout.token_bytes
        assert spans[:, 2].sum() == moved == np.count_nonzero(received.flat != 0xEE)
    finally:
        source_pool.close()
        received.close()


@given(plans())
def test_an_exporter_streams_the_same_bytes_in_the_same_order(
    plan: tuple[BlockRun, BlockRun, int, int],
) -> None:
    source, destination, begin, end = plan
    ours = plan_spans(source, destination, begin, end)[:, [0, 2]]
    theirs = source_ranges(source, begin, end)
    assert byte_order(ours) == byte_order(theirs)


def byte_order(ranges: Spans) -> list[int]:
    return [byte for offset, nbytes in ranges for byte in range(offset, offset + nbytes)]


@given(plans())
def test_neighbouring_spans_are_joined(plan: tuple[BlockRun, BlockRun, int, int]) -> None:
    spans = plan_spans(*plan)
    ends = spans[:-1, :2] + spans[:-1, 2:]
    assert not (ends == spans[1:, :2]).all(axis=1).any()


def test_consecutive_whole_blocks_are_one_span() -> None:
    source = BlockRun(SMALL, np.arange(4, 12))
    destination = BlockRun(SMALL, np.arange(20, 28))
    spans = plan_spans(source, destination, 0, 32)
    size = SMALL.block_bytes
    assert spans.tolist() == [[4 * size, 20 * size, 8 * size]]


def test_scattered_whole_blocks_are_one_span_each() -> None:
    source = BlockRun(SMALL, np.array([9, 2, 5]))
    spans = plan_spans(source, BlockRun(SMALL, np.array([1, 8, 3])), 0, 12)
    assert (spans // SMALL.block_bytes).tolist() == [[9, 1, 1], [2, 8, 1], [5, 3, 1]]


def test_an_empty_range_has_no_spans() -> None:
    run = BlockRun(SMALL, np.array([1]))
    assert plan_spans(run, run, 3, 3).shape == (0, 3)


@pytest.mark.parametrize(("begin", "end"), [(0, 9), (3, 8), (8, 13)])
def test_a_run_must_cover_the_range(begin: int, end: int) -> None:
    covering = BlockRun(SMALL, np.arange(8))
    short = BlockRun(SMALL, np.array([1, 2]), first_block=1)  # tokens 4..12
    with pytest.raises(ValueError, match=r"tokens .* are not all in blocks for 4\.\.12"):
        plan_spans(short, covering, begin, end)
    with pytest.raises(ValueError, match=r"tokens .* are not all in blocks for 4\.\.12"):
        plan_spans(covering, short, begin, end)


@pytest.mark.parametrize(
    "other",
    [
        KvLayout(3, 2, 8, 4, KvDtype.FLOAT32),
        KvLayout(2, 1, 8, 4, KvDtype.FLOAT32),
        KvLayout(2, 2, 16, 4, KvDtype.FLOAT32),
        KvLayout(2, 2, 8, 4, KvDtype.BFLOAT16),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_both_layouts(other: KvLayout) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(SMALL, other)
    assert SMALL.describe() in str(caught.value)
    assert other.describe() in str(caught.value)


def test_another_block_size_is_compatible() -> None:
    check_compatible(SMALL, KvLayout(2, 2, 8, 64, KvDtype.FLOAT32))
