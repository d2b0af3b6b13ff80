"""Products of integers: of codes, and of x of bfloat16 in 8 bits, or 16 around outliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.native.linear import (
    LinearResult,
    PackedLinear,
    empty_packed,
    linear,
    pack,
    pack_codes,
)
from pdserve.engine.plan.forms import INT8, coded_form
from pdserve.model_files.coding import Codes, Coding, Rounded, ScaleType
from tests.codes import CODINGS, NESTED, random_codes
from tests.kernels.cases import EACH_VARIANT, VARIANTS
from tests.kernels.linear_cases import FLOAT_RESULTS, GATED, random_rows, row_counts
from tests.matrix import examples
from tests.unpack import unpack

Floats = NDArray[np.float32]


def packed(codes: Codes, *, is_gated: bool = False) -> PackedLinear:
    made = empty_packed(coded_form(codes.coding), *codes.codes.shape, is_gated=is_gated)
    pack_codes(made, 0, codes)
    return made


def with_outliers(x: Tensor, count: int, seed: int) -> Tensor:
    """`x`, with `count` columns far above the others, in place."""
    columns = np.random.default_rng(seed).integers(0, x.shape[1], count)
    x[:, columns] *= torch.tensor([1, 20, 300])[torch.arange(len(x)) % 3, None].to(x.dtype)
    return x


def integers_of(x: Tensor) -> tuple[NDArray[np.int64], Floats]:
    """[rows, groups of 16, 16] integers, and [rows] what they are multiplied by."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32))
    halves = padded.numpy().reshape(len(x), -1, 16)
    largest = np.abs(halves).max(axis=2)
    of_blocks = largest.reshape(len(x), -1, 2).max(axis=2)
    # One after the other, as sums of float32 depend on it.
    mean = np.cumsum(of_blocks, axis=1, dtype=np.float32)[:, -1:] / np.float32(of_blocks.shape[1])
    is_wide = (of_blocks > np.float32(1.5) * mean).repeat(2, axis=1)
    of_row = of_blocks.max(axis=1, keepdims=True)

    def over_largest(number: int) -> Floats:
        return np.divide(np.float32(number), of_row, out=np.zeros_like(of_row), where=of_row > 0)

    multiplier = np.ceil(largest * over_largest(257)).clip(1, 257)
    multiplier[is_wide] = 1
    factor = over_largest(32639) / multiplier
    p = np.rint(halves * factor[:, :, None])
    q = (p * multiplier[:, :, None]).astype(np.int64)
    return q, of_row[:, 0] / np.float32(32639)


def expected_of(x: Tensor, codes: Codes) -> Floats:
    """The product in the documented order, operation by operation in float32: [rows, outputs]."""
    if codes.coding == NESTED:
        codes = bytes_of(codes)
    coding = codes.coding
    q, scale_of_x = integers_of(x)
    num_halves = q.shape[1]
    wide = np.zeros((len(codes.codes), num_halves * 16), np.int64)
    wide[:, : x.shape[1]] = codes.codes[:, : x.shape[1]]
    products = np.einsum("ohk,rhk->roh", wide.reshape(len(wide), -1, 16), q)
    products -= coding.zero * q.sum(axis=2)[:, None, :]
    of_x = q.sum(axis=2)
    ones = np.ones(codes.codes.shape, np.uint8)
    plain = replace(coding, zero=0, has_minimums=False, rounded=Rounded.FLOAT32)
    scales = each_half(replace(codes, coding=plain, codes=ones, minimums=None), num_halves)
    minimums = np.zeros_like(scales)
    if codes.minimums is not None:
        taken = replace(
            codes,
            coding=plain,
            codes=ones,
            scales=codes.minimums,
            super_scales=codes.super_minimums,
            minimums=None,
            super_minimums=None,
        )
        minimums = each_half(taken, num_halves)
    total = np.zeros((len(x), len(wide)), np.float32)
    step = 1 if coding.group == 16 else 2  # halves with a minimum
    group = coding.group // 16
    for h in range(0, num_halves, step):
        if coding.has_minimums:
            sums = of_x[:, h : h + step].sum(axis=1).astype(np.float32)
            total = total - sums[:, None] * minimums[:, h]
        end = h + step
        if end % group == 0 or end == num_halves:
            start = h // group * group
            total = total + products[:, :, start:end].sum(axis=2).astype(np.float32) * scales[:, h]
    return total * scale_of_x[:, None]


def bytes_of(codes: Codes) -> Codes:
    """What nested codes make, padded to whole groups."""
    assert codes.minimums is not None
    assert codes.super_scales is not None
    scales = codes.scales.astype(np.int64).repeat(32, axis=1)
    numbers = codes.codes * scales - codes.minimums.repeat(32, axis=1)
    assert np.abs(numbers).max() <= 127
    padded = np.pad(numbers + 128, ((0, 0), (0, -codes.codes.shape[1] % 256)))
    return Codes(Coding(8, 256, 128), padded.astype(np.uint8), codes.super_scales)


def each_half(ones: Codes, count: int) -> Floats:
    """What 16 inputs are multiplied by: [outputs, count]."""
    decoded = ones.decoded()[:, ::16][:, :count]
    return np.pad(decoded, ((0, 0), (0, count - decoded.shape[1])))


@settings(max_examples=examples(40))
@given(
    coding=st.sampled_from(CODINGS),
    num_out=st.integers(1, 40),
    num_groups=st.integers(1, 18),
    num_rows=row_counts(),
    num_outliers=st.integers(0, 2),
    seed=st.integers(0, 3),
)
def test_products_have_the_bits_of_the_documented_order_in_every_build(
    coding: Coding, num_out: int, num_groups: int, num_rows: int, num_outliers: int, seed: int
) -> None:
    codes = random_codes(coding, num_out, num_groups * coding.group, seed)
    made = packed(codes)
    x = random_rows(num_rows, num_groups * coding.group, torch.bfloat16, is_strided=seed > 1)
    expected = torch.from_numpy(expected_of(with_outliers(x, num_outliers, seed), codes))
    out = torch.empty_like(expected)
    for variant in VARIANTS:
        note(variant)
        assert torch.equal(linear(x, made, out, LinearResult.STORE_FLOAT, variant), expected)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("num_rows", [1, 38])
@pytest.mark.parametrize("has_minimums", [False, True])
def test_what_other_products_left_in_memory_is_not_read(
    has_minimums: bool, num_rows: int, variant: str
) -> None:
    coding = Coding(5, 16, 16, ScaleType.FLOAT32, has_minimums)
    before = random_codes(coding, 1, 64)
    before.scales.fill(np.nan)
    codes = random_codes(coding, 1, 48)
    x = random_rows(num_rows, 64, torch.bfloat16, is_strided=False)
    out = torch.empty(num_rows, 1)
    linear(x, packed(before), out, LinearResult.STORE_FLOAT, variant)
    linear(x[:, :48], packed(codes), out, LinearResult.STORE_FLOAT, variant)
    assert torch.equal(out, torch.from_numpy(expected_of(x[:, :48], codes)))


@settings(max_examples=examples(40))
@given(
    coding=st.sampled_from([*CODINGS, None]),
    result=st.sampled_from(list(LinearResult)),
    num_in=st.integers(1, 5),
    num_rows=row_counts(),
    data=st.data(),
)
def test_bits_depend_on_the_row_alone_and_not_on_the_build(
    coding: Coding | None, result: LinearResult, num_in: int, num_rows: int, data: st.DataObject
) -> None:
    """What follows the product, too: bias, residual, silu and gelu."""
    is_gated = result in GATED
    if coding is None:
        weight = torch.randn(60, num_in * 37)
        made = pack(weight, torch.randn(60), form=INT8, is_gated=is_gated)
    else:
        made = packed(random_codes(coding, 60, num_in * coding.group), is_gated=is_gated)
    x = random_rows(num_rows, made.num_in, torch.bfloat16, is_strided=False)
    with_outliers(x, num_in - 1, num_rows)
    before = torch.randn(num_rows, made.num_columns)
    before = before if result in FLOAT_RESULTS else before.bfloat16()
    expected = linear(x, made, before.clone(), result, "portable")
    cut = data.draw(st.integers(0, num_rows))
    for variant in VARIANTS:
        note(variant)
        for rows in (slice(0, cut), slice(cut, num_rows)):
            found = linear(x[rows], made, before[rows].clone(), result, variant)
            assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("outlier", [1, 100])
def test_the_error_is_half_a_step_and_outliers_spread_none(outlier: int, variant: str) -> None:
    """Of 8 bits of the largest of 16 inputs, nearly; outliers and those beside them have 16."""
    codes = random_codes(Coding(4, 32, 8), 64, 4096)
    made, x = packed(codes), torch.randn(9, 4096).bfloat16()
    x[:, 5::512] *= outlier
    weights = unpack(made).double()
    found = linear(x, made, torch.empty(9, 64), LinearResult.STORE_FLOAT, variant)
    error = (found.double() - x.double() @ weights.T).square().mean().sqrt()
    largest = x.double().abs().view(9, -1, 2, 16).amax(3)
    of_blocks = largest.amax(2, keepdim=True)
    is_wide = of_blocks > 1.5 * of_blocks.mean(1, keepdim=True)
    assert is_wide.double().mean() < 0.1
    finest = largest.amax((1, 2), keepdim=True).unsqueeze(3) / 32639
    multiplier = (largest / (127 * finest[..., 0])).ceil()
    step = torch.where(is_wide, 1, multiplier) * finest[..., 0]
    step = step.view(9, -1).repeat_interleave(16, dim=1)
    predicted = ((step.square() / 12) @ weights.T.square()).mean().sqrt()
    assert 0.5 * predicted < error < 1.2 * predicted


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [1e-38, -1e-39],
        [3e35, -3e35, 1.0],
        [-0.0, 1e-30],
        [127.0, 126.5, -127.0],
        [*[1e-3] * 35, 3e34, *[-1.0] * 40],
    ],
    ids=str,
)
def test_extreme_inputs_are_multiplied(values: list[float]) -> None:
    codes = random_codes(Coding(8, 32, 128), 16, 128)
    x: Any = torch.tensor(values).repeat(128)[:128][None].bfloat16()
    made = packed(codes)
    expected = x.double() @ unpack(made).double().T
    results = [
        linear(x, made, torch.empty(1, 16), LinearResult.STORE_FLOAT, variant)
        for variant in VARIANTS
    ]
    assert all(torch.equal(found, results[0]) for found in results)
    bound = 2 * float(x.double().abs().max()) + 1e-29
    assert ((results[0].double() - expected).abs() <= bound).all()
