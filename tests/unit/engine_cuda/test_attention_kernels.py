"""The Triton kernels of attention against plain torch, and what they promise about bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.attention import LayerKv
from tests.kernels.cases import GPU_DTYPES, Case, Shape, alone, make_case
from tests.matrix import examples, matrix
from tests.unit.engine_cuda.checks import attend, check_attention, check_place

pytestmark = pytest.mark.usefixtures("interpreted")


def triton_attention():
    from pdserve.engine.cuda.attention.triton_attention import (
        TritonAttention,  # once they are interpreted
    )

    return TritonAttention()


SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 2),
    group_size=st.sampled_from([1, 2, 3, 5, 8, 16]),
    head_dim=st.sampled_from([8, 32, 64, 80, 128]),
    block_size=st.integers(1, 32),
    num_layers=st.integers(1, 2),
    dtype=st.sampled_from(GPU_DTYPES),
    has_sinks=st.booleans(),
)
# Of latent attention: all heads have one row a token, the first numbers of which are its value.
LATENT_SHAPES = st.builds(
    lambda value_dim, rest, **sizes: Shape(
        1, head_dim=value_dim + rest, value_dim=value_dim, **sizes
    ),
    value_dim=st.sampled_from([8, 52, 64, 70, 130]),
    rest=st.sampled_from([2, 12, 16, 64]),
    group_size=st.sampled_from([1, 3, 16, 20]),
    block_size=st.integers(1, 32),
    num_layers=st.integers(1, 2),
    dtype=st.sampled_from(GPU_DTYPES),
)
ROWS = st.one_of(st.just(1), st.integers(0, 70))
BEFORE = st.one_of(st.just(0), st.integers(0, 150), st.sampled_from([63, 255, 256, 600]))


@settings(max_examples=examples(12))
@given(
    shape=SHAPES,
    requests=st.lists(st.tuples(ROWS, BEFORE), min_size=0, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 200)),
    seed=st.integers(0, 9),
    is_strided=st.booleans(),
)
def test_any_batch_matches_the_reference(shape, requests, window, seed, is_strided) -> None:
    case = make_case(shape, requests, seed, is_strided)
    check_attention(triton_attention(), case, window, shape.num_layers - 1)


@settings(max_examples=examples(8))
@given(
    shape=LATENT_SHAPES,
    requests=st.lists(st.tuples(ROWS, BEFORE), min_size=0, max_size=3),
    seed=st.integers(0, 9),
)
def test_any_batch_of_latent_rows_matches_the_reference(shape, requests, seed) -> None:
    case = make_case(shape, requests, seed)
    check_attention(triton_attention(), case, None, shape.num_layers - 1)


@pytest.mark.parametrize("num_heads", matrix([20, 1], 1))
def test_heads_of_wide_rows_share_several_programs(num_heads: int) -> None:
    """As DeepSeek's, which are 576 numbers: no program has all heads of a token."""
    shape = Shape(1, num_heads, 300, value_dim=280, dtype=torch.bfloat16)
    check_attention(triton_attention(), make_case(shape, [(1, 30), (3, 9)]), None)


@pytest.mark.long
def test_more_keys_than_one_split_takes_at_least() -> None:
    """52 of 64 splits have keys, 320 each, but for the last one."""
    case = make_case(Shape(1, 2, 32), [(1, 16_500), (1, 3)])
    check_attention(triton_attention(), case, None)


@pytest.mark.parametrize("dtype", matrix(GPU_DTYPES, 1))
def test_scores_are_kept_within_a_cap(dtype: torch.dtype) -> None:
    case = make_case(Shape(2, 3, 32, dtype=dtype, cap=0.7), [(1, 70), (9, 40)])
    check_attention(triton_attention(), case, 33)


def test_few_heads_have_more_splits() -> None:
    from pdserve.engine.cuda.attention.split_keys import num_splits

    assert [num_splits(heads) for heads in (1, 2, 3, 4, 8, 32)] == [64, 64, 64, 32, 16, 16]


def rows_of(case: Case, request: int) -> slice:
    return slice(int(case.batch.query_start[request]), int(case.batch.query_start[request + 1]))


@pytest.mark.parametrize(
    ("shape", "window"),
    matrix(
        [
            (Shape(1, 3, 32, block_size=7), 40),
            (Shape(1, 3, 32, block_size=7, dtype=torch.bfloat16, has_sinks=True), None),
            (Shape(1, 3, 48, block_size=7, value_dim=36), None),
        ],
        1,
    ),
)
def test_a_row_s_bits_are_its_own(shape: Shape, window: int | None) -> None:
    """Alone, beside others, and however a chunk of several rows is cut."""
    case = make_case(shape, [(40, 90), (1, 300), (9, 0)])
    backend = triton_attention()
    together = attend(backend, case, window)
    for request, cuts in ((0, (0, 13, 15, 40)), (1, (0, 1)), (2, (0, 9))):
        parts = [
            attend(backend, alone(case, request, first, last), window)
            for first, last in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), together[rows_of(case, request)])


def decode(case: Case, window: int | None = None) -> Tensor:
    kv = LayerKv(case.kv_pool, 0, case.shape.scale, window, None, case.sinks, case.shape.value_dim)
    return triton_attention().attend_decode(case.query, kv, case.batch)


def test_the_result_goes_where_it_is_wanted() -> None:
    case = make_case(Shape(1, 3, 32), [(3, 40), (1, 3)])
    check_place(triton_attention(), case)
    kv = LayerKv(case.kv_pool, 0, 1.0)
    for wrong in (case.query[1:], case.query.bfloat16(), case.query.mT.contiguous().mT):
        with pytest.raises(ValueError, match="the result is"):
            triton_attention().attend(case.query, kv, case.batch, wrong)


def test_decode_alone_has_the_bits_of_the_mixed_step() -> None:
    case = make_case(Shape(), [(1, 70), (1, 300), (1, 0)])
    assert torch.equal(decode(case, 50), attend(triton_attention(), case, 50))


@pytest.mark.parametrize("shape", matrix([Shape(has_sinks=True), Shape(1, value_dim=48)], 1))
def test_rows_without_context_fill_up_and_give_zeros(shape: Shape) -> None:
    """Whatever stands in their block tables: it is not read."""
    case = make_case(shape, [(1, 70), (1, 9)])
    filled = replace(
        case,
        query=torch.cat([case.query, torch.full_like(case.query, float("nan"))]),
        batch=replace(
            case.batch,
            query_start=torch.arange(5, dtype=torch.int32),
            context_lens=torch.cat([case.batch.context_lens, torch.zeros(2, dtype=torch.int32)]),
            block_tables=torch.cat([case.batch.block_tables, -case.batch.block_tables - 10**6]),
        ),
    )
    found = decode(filled)
    assert torch.equal(found[:2], decode(case))
    assert torch.equal(found[2:], torch.zeros_like(found[2:]))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("row", [2, 4])
def test_nan_in_a_query_reaches_its_row_and_no_other(row: int) -> None:
    case = make_case(Shape(), [(4, 70), (1, 9)])
    clean = attend(triton_attention(), case)
    case.query[row, 1, 5] = float("nan")
    found = attend(triton_attention(), case)
    assert found[row, 1].isnan().all()
    found[row, 1] = clean[row, 1]
    assert torch.equal(found, clean)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"query": torch.zeros(5, 4, 64, dtype=torch.float64)}, TypeError),
        ({"query": torch.zeros(5, 3, 64)}, ValueError),
        ({"query": torch.zeros(5, 4, 32)}, ValueError),
        ({"query": torch.zeros(5, 4, 128)[:, :, ::2]}, ValueError),
        ({"kv_pool": torch.zeros(9, 2, 2, 2, 16, 128)[..., :64]}, ValueError),
    ],
)
def test_tensors_that_cannot_be_are_refused(change, error) -> None:
    case = replace(make_case(Shape(), [(4, 70), (1, 9)]), **change)
    with pytest.raises(error):
        attend(triton_attention(), case)


def test_batches_and_arguments_that_cannot_be_are_refused() -> None:
    case = make_case(Shape(), [(4, 70), (1, 9)])
    for batch in (
        replace(case.batch, context_lens=case.batch.context_lens[:1]),
        replace(case.batch, block_tables=case.batch.block_tables[:1]),
    ):
        with pytest.raises(ValueError, match="requests throughout"):
            attend(triton_attention(), replace(case, batch=batch))
    batch = replace(case.batch, context_lens=case.batch.context_lens.long())
    with pytest.raises(TypeError, match="int32"):
        attend(triton_attention(), replace(case, batch=batch))
    with pytest.raises(ValueError, match="layer 2 of 2"):
        attend(triton_attention(), case, layer=2)
    with pytest.raises(ValueError, match="window of 0"):
        attend(triton_attention(), case, window=0)
    with pytest.raises(ValueError, match="5 rows of 2 requests"):
        decode(case)
    for sinks in (torch.zeros(3), torch.zeros(4).bfloat16()):
        with pytest.raises(ValueError, match="of 4 heads, in float32"):
            attend(triton_attention(), replace(case, sinks=sinks))
    with pytest.raises(ValueError, match="are no attention"):
        attend(triton_attention(), replace(case, shape=replace(case.shape, value_dim=48)))
