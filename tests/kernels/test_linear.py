"""Products with packed matrices against float64, and the promises about bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pdserve import _native
from pdserve.engine.native.linear import LinearResult
from pdserve.engine.plan.forms import FLOAT32, WeightForm
from tests.kernels.cases import EACH_VARIANT, VARIANTS
from tests.kernels.linear_cases import (
    DTYPES,
    GATED,
    WEIGHT_FORMS,
    Product,
    expect_reference,
    make_case,
    products,
    row_counts,
)
from tests.matrix import examples, matrix


@settings(max_examples=examples(120))
@given(
    product=products(),
    num_rows=row_counts(),
    seed=st.integers(0, 9),
    is_strided=st.booleans(),
)
def test_every_variant_matches_the_reference(
    product: Product, num_rows: int, seed: int, is_strided: bool
) -> None:
    case = make_case(product, num_rows, seed, is_strided)
    for variant in VARIANTS:
        note(variant)
        expect_reference(case.run(variant), case)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("result", matrix(list(LinearResult), 2))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_long_sums_are_exact_enough_in_every_variant(
    form: WeightForm, dtype: torch.dtype, result: LinearResult, variant: str
) -> None:
    product = Product(form, dtype, num_out=96, num_in=3000, result=result, has_bias=True)
    case = make_case(product, num_rows=14)
    expect_reference(case.run(variant), case)


@settings(max_examples=examples(60))
@given(product=products(), num_rows=row_counts(), data=st.data())
def test_bits_of_a_row_do_not_depend_on_the_others(
    product: Product, num_rows: int, data: st.DataObject
) -> None:
    case = make_case(product, num_rows)
    parts, start = [], 0
    while start < num_rows:
        count = data.draw(st.integers(1, num_rows - start))
        parts.append(slice(start, start + count))
        start += count
    for variant in VARIANTS:
        note(variant)
        together = case.run(variant)
        for part in parts:
            assert torch.equal(case.run(variant, rows=part), together[part])


@settings(max_examples=examples(20))
@given(product=products(), num_rows=row_counts(), num_threads=st.integers(2, 5))
def test_bits_do_not_depend_on_the_threads(
    product: Product, num_rows: int, num_threads: int
) -> None:
    # Enough panels that there is something to share.
    case = make_case(dataclasses.replace(product, num_out=2048, num_in=130), num_rows)
    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        one = case.run()
        _native.set_num_threads(num_threads)
        assert torch.equal(case.run(), one)
    finally:
        _native.set_num_threads(before)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_what_is_not_finite_stays_in_its_row(form: WeightForm, value: float, variant: str) -> None:
    for dtype in DTYPES:
        case = make_case(Product(form, dtype, num_in=33, result=LinearResult.STORE_FLOAT), 15)
        clean = case.run(variant)
        x = case.x.clone()
        x[7, 20] = value
        found = case.run(variant, x=x)
        assert not found[7].isfinite().any()
        found[7] = clean[7]
        assert torch.equal(found, clean)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_a_row_of_x_does_not_matter(dtype: torch.dtype, variant: str) -> None:
    """An odd number of inputs: the pair's other half belongs to somebody else."""
    for form in WEIGHT_FORMS:
        case = make_case(Product(form, dtype, num_in=33), 5)
        wide = torch.full((5, 40), float("nan"), dtype=dtype)
        wide[:, :33] = case.x
        assert torch.equal(case.run(variant, x=wide[:, :33]), case.run(variant))


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("result", list(LinearResult))
def test_nothing_is_written_beside_the_columns(result: LinearResult, variant: str) -> None:
    product = Product(num_out=2 * 37, result=result)
    case = make_case(product, 14)
    columns = case.packed.num_columns
    wide = torch.full((14, columns + 20), 7.0).to(product.out_dtype)
    wide[:, 3 : 3 + columns] = case.before
    _native.linear(case.x, case.packed, wide[:, 3 : 3 + columns], result, variant)
    assert torch.equal(wide[:, 3 : 3 + columns], case.run(variant))
    assert bool((wide[:, :3] == 7).all())
    assert bool((wide[:, 3 + columns :] == 7).all())


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_variants_with_the_same_arithmetic_agree_bit_by_bit(form: WeightForm) -> None:
    case = make_case(Product(form, torch.float32, num_in=301, result=LinearResult.STORE_FLOAT), 20)
    fused = [v for v in VARIANTS if v not in ("portable", "amx_emulated")]
    results = [case.run(variant) for variant in fused]
    assert all(torch.equal(found, results[0]) for found in results)


def test_a_product_without_rows_is_empty() -> None:
    case = make_case(Product(), 0)
    assert case.run().shape == (0, 64)


@pytest.mark.parametrize("result", GATED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_results_at_their_limits(dtype: torch.dtype, result: LinearResult) -> None:
    """One input of weight 1 each: silu(x) * x, where exp(-x) overflows, and at zero."""
    product = Product(FLOAT32, dtype, num_out=32, num_in=1, result=result)
    case = make_case(product, 7)
    _native.pack_linear_rows(case.packed, 0, torch.ones(32, 1))
    x = torch.tensor([0.0, -0.5, 30.0, -30.0, -100.0, 100.0, float("nan")]).to(dtype)[:, None]
    found = case.run(x=x)
    activated, up = GATED[result](x.double(), x.double())
    expected = activated * up
    torch.testing.assert_close(
        found.double(),
        expected.expand(7, 16),
        rtol=2e-6 if dtype is torch.float32 else 2**-8,
        atol=1e-30,
        equal_nan=True,
    )
