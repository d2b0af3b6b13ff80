"""The native kernels against plain torch, and the promises about bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from pdserve.engine.attention import LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.kv.coded_rows import decoded, encoded
from tests.kernels.cases import (
    CODES,
    DTYPES,
    EACH_VARIANT,
    TOLERANCE,
    VARIANTS,
    Case,
    Shape,
    alone,
    make_case,
    requests,
    stored_shapes,
)
from tests.matrix import examples, matrix
from tests.native_attention import NativeAttention

WINDOWS = st.one_of(st.none(), st.integers(1, 200))


def attend(case: Case, window: int | None = None, layer: int = 0, variant: str = "") -> Tensor:
    kv = LayerKv(case.kv_pool, layer, case.shape.scale, window, case.shape.cap, case.sinks)
    return NativeAttention(variant).attend(case.query, kv, case.batch)


def by_reference(case: Case, window: int | None, layer: int) -> Tensor:
    pool = decoded(case.kv_pool).nan_to_num()
    kv = LayerKv(pool, layer, case.shape.scale, window, case.shape.cap, case.sinks)
    return ReferenceAttention().attend(case.query.float(), kv, case.batch)


def expect_close(found: Tensor, expected: Tensor, case: Case, slack: float = 1.0) -> None:
    tolerance = TOLERANCE[case.shape.dtype] * slack
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_every_variant_matches_the_reference(data: st.DataObject) -> None:
    shape = data.draw(stored_shapes())
    case = make_case(
        shape, data.draw(requests()), data.draw(st.integers(0, 9)), data.draw(st.booleans())
    )
    window = data.draw(WINDOWS)
    layer = data.draw(st.integers(0, shape.num_layers - 1))
    expected = by_reference(case, window, layer)
    for variant in VARIANTS:
        note(variant)
        found = attend(case, window, layer, variant)
        assert found.is_contiguous()
        assert found.dtype == shape.dtype
        expect_close(found, expected, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim"),
    matrix([(2, 3, 64), (1, 8, 80), (1, 1, 32), (2, 4, 128), (1, 5, 256), (1, 100, 64)], 2),
)
def test_usual_shapes_match_the_reference(
    num_kv_heads: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    shape = Shape(num_kv_heads, group_size, head_dim, dtype=dtype)
    case = make_case(shape, [(1, 200), (70, 60), (1, 0), (5, 5)])
    for window in (None, 33):
        expected = by_reference(case, window, 1)
        for variant in VARIANTS:
            expect_close(attend(case, window, 1, variant), expected, case)


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize(("num_rows", "earlier"), [(1, 1400), (130, 0)])
def test_bfloat16_is_hardly_worse_than_its_rounding(
    num_rows: int, earlier: int, variant: str, codes: torch.dtype | None
) -> None:
    """Rounding the softmax weights too adds at most as much as rounding the result takes.

    Where scales are in them, the denominator is not rounded with them, which takes out little less.
    """
    shape = Shape(2, 3, 64, dtype=torch.bfloat16, codes=codes)
    case = make_case(shape, [(num_rows, earlier)])
    kv = LayerKv(decoded(case.kv_pool).nan_to_num().double(), 0, case.shape.scale)
    exact = ReferenceAttention().attend(case.query.double(), kv, case.batch)
    error = (attend(case, variant=variant).double() - exact).square().mean().sqrt()
    unavoidable = (exact.bfloat16().double() - exact).square().mean().sqrt()
    assert error < (2**0.5 if codes is None else 1.8) * unavoidable


@pytest.mark.parametrize("variant", EACH_VARIANT)
@settings(max_examples=examples(12))
@given(
    shape=stored_shapes(),
    total=st.integers(1, 200),
    chunks=st.lists(st.integers(1, 80), min_size=1, max_size=6),
    window=WINDOWS,
)
def test_bits_do_not_depend_on_the_chunks(
    variant: str, shape: Shape, total: int, chunks: list[int], window: int | None
) -> None:
    case = make_case(shape, [(total, 0)])
    whole = attend(case, window, variant=variant)
    start = 0
    while start < total:
        end = min(total, start + chunks[start % len(chunks)])
        part = attend(alone(case, 0, start, end), window, variant=variant)
        assert torch.equal(part, whole[start:end])
        start = end


@pytest.mark.parametrize("variant", EACH_VARIANT)
@settings(max_examples=examples(12))
@given(shape=stored_shapes(), requests=requests(), window=WINDOWS)
def test_bits_do_not_depend_on_the_batch(
    variant: str, shape: Shape, requests: list[tuple[int, int]], window: int | None
) -> None:
    case = make_case(shape, requests)
    together = attend(case, window, variant=variant)
    starts = case.batch.query_start.tolist()
    for r, (num_rows, _) in enumerate(requests):
        part = attend(alone(case, r, 0, num_rows), window, variant=variant)
        assert torch.equal(part, together[starts[r] : starts[r + 1]])


@settings(max_examples=examples(12))
@given(shape=stored_shapes(), requests=requests(), num_threads=st.integers(2, 5))
def test_bits_do_not_depend_on_the_threads(
    shape: Shape, requests: list[tuple[int, int]], num_threads: int
) -> None:
    case = make_case(shape, requests)
    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        one = attend(case)
        _native.set_num_threads(num_threads)
        assert torch.equal(attend(case), one)
    finally:
        _native.set_num_threads(before)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 600])
def test_bits_do_not_depend_on_how_runs_are_shared_out(
    window: int | None, dtype: torch.dtype, variant: str
) -> None:
    """One thread goes through all keys; many threads share a long context's runs, and fold them."""
    case = make_case(Shape(1, 3, 32, dtype=dtype), [(1, 2600), (5, 1100), (1, 511), (1, 0)])
    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        one = attend(case, window, variant=variant)
        _native.set_num_threads(4)
        assert torch.equal(attend(case, window, variant=variant), one)
    finally:
        _native.set_num_threads(before)
    expect_close(one, by_reference(case, window, 0), case)


@settings(max_examples=examples(30))
@given(shape=stored_shapes(), requests=requests(), data=st.data(), window=WINDOWS)
def test_only_wanted_rows_are_attended(
    shape: Shape, requests: list[tuple[int, int]], data: st.DataObject, window: int | None
) -> None:
    case = make_case(shape, requests)
    num_tokens = len(case.query)
    wanted = data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    chosen = torch.tensor(wanted, dtype=torch.bool)
    out = torch.full(case.query.shape, 7.0, dtype=shape.dtype)
    _native.paged_attention(
        case.query,
        case.kv_pool,
        0,
        case.batch.query_start,
        case.batch.context_lens,
        case.batch.block_tables,
        shape.scale,
        window or 0,
        out,
        chosen.nonzero().flatten(),
        cap=shape.cap or 0.0,
        sinks=case.sinks,
    )
    assert torch.equal(out[chosen], attend(case, window)[chosen])
    assert (out[~chosen] == 7.0).all()


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_variants_with_the_same_arithmetic_agree_bit_by_bit(
    dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    fused = {"avx512", "avx2"} | ({"avx512_bf16"} if dtype is torch.float32 else set())
    case = make_case(Shape(2, 3, 80, 5, dtype=dtype, codes=codes), [(70, 60), (1, 200)])
    results = [attend(case, variant=v) for v in VARIANTS if v in fused]
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart(dtype: torch.dtype, variant: str) -> None:
    """Weights that vanish, and a maximum that keeps rising: the online softmax at its limits."""
    case = make_case(Shape(1, 2, 32, dtype=dtype), [(3, 300)])
    case.query.mul_(100)
    expect_close(attend(case, variant=variant), by_reference(case, None, 0), case, slack=100.0)


@pytest.mark.parametrize("variant", EACH_VARIANT)
def test_nan_in_a_query_reaches_its_row_and_no_other(variant: str) -> None:
    case = make_case(Shape(), [(4, 1070), (1, 9)])
    clean = attend(case, variant=variant)
    case.query[2, 1, 5] = float("nan")
    found = attend(case, variant=variant)
    assert found[2, 1].isnan().all()
    found[2, 1] = clean[2, 1]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group_size", "num_rows"), [(1, 9), (3, 9), (8, 5), (1, 70)])
@pytest.mark.parametrize("window", matrix([None, 4], {4}))
def test_nan_in_a_value_reaches_those_who_see_it_and_no_others(
    variant: str, dtype: torch.dtype, group_size: int, num_rows: int, window: int | None
) -> None:
    """A weight of 0 hides no NaN: a row's result must not depend on later rows of its chunk."""
    earlier, shape = 30, Shape(1, group_size, dtype=dtype)
    case = make_case(shape, [(num_rows, earlier)])
    clean = attend(case, window, variant=variant)
    for row in (1, num_rows // 2, num_rows - 1):
        block, offset = divmod(earlier + row, shape.block_size)
        value = case.kv_pool[case.batch.block_tables[0, block], 0, 1, 0, offset]
        before = value.clone()
        value.fill_(float("nan"))
        found = attend(case, window, variant=variant)
        value.copy_(before)
        end = num_rows if window is None else min(num_rows, row + window)
        assert found[row:end].isnan().all()
        found[row:end] = clean[row:end]
        assert torch.equal(found, clean)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group_size", "num_rows"), [(3, 9), (1, 70)])
@pytest.mark.parametrize("window", [None, 4])
def test_a_scale_of_nan_reaches_those_who_see_it_and_no_others(
    variant: str, dtype: torch.dtype, group_size: int, num_rows: int, window: int | None
) -> None:
    earlier, shape = 30, Shape(1, group_size, dtype=dtype, codes=torch.int8)
    case = make_case(shape, [(num_rows, earlier)])
    clean = attend(case, window, variant=variant)
    for row in (1, num_rows // 2, num_rows - 1):
        block, offset = divmod(earlier + row, shape.block_size)
        value = case.kv_pool[case.batch.block_tables[0, block], 0, 1, 0, offset]
        before = value.clone()
        value[-4:] = -1  # all bits are set
        found = attend(case, window, variant=variant)
        value.copy_(before)
        end = num_rows if window is None else min(num_rows, row + window)
        assert found[row:end].isnan().all()
        found[row:end] = clean[row:end]
        assert torch.equal(found, clean)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("codes", CODES)
def test_small_weights_beside_a_large_one_are_not_lost(codes: torch.dtype, variant: str) -> None:
    """As beside the first token of real models: nearly all the weight, and hardly a value."""
    shape = Shape(1, 3, 64, dtype=torch.bfloat16, codes=codes)
    case = make_case(shape, [(1, 60)])
    sink = encoded(torch.cat([case.query[0, :1].float(), torch.full((1, 64), 1e-4)]), codes)
    case.kv_pool[case.batch.block_tables[0, 0], 0, :, 0, 0] = sink
    found = attend(case, variant=variant)[0, 0]
    expected = by_reference(case, None, 0)[0, 0]
    assert expected.abs().max() < 0.2  # most weight is on the sink
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_nan_in_a_visible_key_is_not_hidden() -> None:
    case = make_case(Shape(1, 1, block_size=16), [(1, 79)])
    case.kv_pool[case.batch.block_tables[0, 1], 0, 0, 0, 3] = float("nan")
    assert attend(case).isnan().all()


def test_the_reference_is_torch_s_own_attention() -> None:
    """Without paging, cutting and groups, so that the oracle itself rests on something else."""
    case = make_case(Shape(2, 1, 32, block_size=7), [(50, 0)])
    key, value = torch.randn(2, 50, 2, 32).unbind()
    ReferenceAttention().write_kv(case.kv_pool, 1, key, value, case.batch)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    kv = LayerKv(case.kv_pool, 1, case.shape.scale)
    found = ReferenceAttention().attend(case.query, kv, case.batch)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [1, 2, 64, 65])
def test_a_window_counts_the_query_s_own_token(window: int) -> None:
    """Position p sees (p - window, p]: with equal keys, the mean of that many values."""
    case = make_case(Shape(1, 1, 16, block_size=4), [(100, 0)])
    key, value = torch.zeros(100, 1, 16), torch.randn(100, 1, 16)
    NativeAttention().write_kv(case.kv_pool, 0, key, value, case.batch)
    seen = [value[max(0, p - window + 1) : p + 1].mean(0) for p in range(100)]
    torch.testing.assert_close(attend(case, window), torch.stack(seen))
