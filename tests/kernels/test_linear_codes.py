"""Coded matrices: the bits are those of the decoded weights, packed in the type of x."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from pdserve.engine.native.linear import (
    LinearResult,
    PackedLinear,
    empty_packed,
    linear,
    pack,
    pack_codes,
    packed_size,
)
from pdserve.engine.plan.forms import FLOAT32, coded_form
from pdserve.model_files.coding import Codes, Coding, Rounded, ScaleType, joined
from tests.codes import CODINGS, random_codes
from tests.kernels.linear_cases import DTYPES, GATED, random_rows, row_counts
from tests.matrix import examples
from tests.unpack import unpack

VARIANTS = _native.kernel_variants()


def packed(codes: Codes, bias: Tensor | None = None, *, is_gated: bool = False) -> PackedLinear:
    form, has_bias = coded_form(codes.coding), bias is not None
    made = empty_packed(form, *codes.codes.shape, is_gated=is_gated, has_bias=has_bias)
    pack_codes(made, 0, codes, bias)
    return made


def some_rows(codes: Codes, first: int, last: int) -> Codes:
    def cut(rows: np.ndarray) -> np.ndarray:
        return rows[first:last]

    return Codes(
        codes.coding,
        cut(codes.codes),
        cut(codes.scales),
        *(
            None if rows is None else cut(rows)
            for rows in (codes.minimums, codes.super_scales, codes.super_minimums)
        ),
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@settings(max_examples=examples(60))
@given(
    coding=st.sampled_from(CODINGS),
    num_out=st.integers(1, 50).map(lambda n: 2 * n),
    num_groups=st.integers(1, 7),
    result=st.sampled_from(list(LinearResult)),
    num_rows=row_counts(),
    has_bias=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_product_is_that_of_the_decoded_weights_bit_for_bit(
    coding: Coding,
    num_out: int,
    num_groups: int,
    result: LinearResult,
    num_rows: int,
    has_bias: bool,
    seed: int,
) -> None:
    """So it is as exact, and as independent of batch, threads and ranks, as plain forms are.

    Of x of float32; of bfloat16, see test_integers.py.
    """
    is_gated = result in GATED
    codes = random_codes(coding, num_out, num_groups * coding.group, seed)
    bias = torch.randn(num_out) if has_bias else None
    coded, weights = packed(codes, bias, is_gated=is_gated), torch.from_numpy(codes.decoded())
    plain = pack(weights, bias, form=FLOAT32, is_gated=is_gated)
    x = random_rows(num_rows, weights.shape[1], torch.float32, is_strided=False)
    before = torch.randn(num_rows, coded.num_columns)
    for variant in VARIANTS:
        note(variant)
        expected = linear(x, plain, before.clone(), result, variant)
        assert same_bits(linear(x, coded, before.clone(), result, variant), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_long_rows_change_no_bit(dtype: torch.dtype) -> None:
    codes = random_codes(CODINGS[2], 512, 4096)
    coded, plain = packed(codes), pack(torch.from_numpy(codes.decoded()), form=FLOAT32)
    x, before = torch.randn(7, 4096).to(dtype), _native.num_threads()
    out = torch.empty(7, 512)
    _native.set_num_threads(2)
    other = plain if dtype is torch.float32 else coded
    expected = linear(x, other, out.clone(), LinearResult.STORE_FLOAT)
    try:
        for num_threads in (1, 3):
            _native.set_num_threads(num_threads)
            assert same_bits(linear(x, coded, out, LinearResult.STORE_FLOAT), expected)
    finally:
        _native.set_num_threads(before)


@settings(max_examples=examples(40))
@given(
    coding=st.sampled_from(CODINGS),
    is_gated=st.booleans(),
    num_out=st.integers(1, 40).map(lambda n: 2 * n),
    num_groups=st.integers(1, 17),
    data=st.data(),
)
def test_codes_may_be_packed_in_any_pieces_and_lose_nothing(
    coding: Coding, is_gated: bool, num_out: int, num_groups: int, data: st.DataObject
) -> None:
    codes = random_codes(coding, num_out, num_groups * coding.group)
    whole = packed(codes, is_gated=is_gated)
    assert same_bits(unpack(whole), torch.from_numpy(codes.decoded()))
    pieces = empty_packed(coded_form(coding), *codes.codes.shape, is_gated=is_gated)
    pieces.weights.fill_(0xFF)
    cuts = sorted({0, num_out, *data.draw(st.lists(st.integers(0, num_out), max_size=4))})
    for first, last in data.draw(st.permutations(list(pairwise(cuts)))):
        pack_codes(pieces, first, some_rows(codes, first, last))
    assert torch.equal(pieces.weights, whole.weights)


@given(st.sampled_from(CODINGS), st.sampled_from(CODINGS))
def test_a_coding_that_holds_two_loses_nothing_of_either(one: Coding, other: Coding) -> None:
    both = joined([one, other])
    assert both == joined([other, one])
    if both is None:
        is_too_wide = 0 in (one.zero, other.zero) and 8 in (one.bits, other.bits)
        assert is_too_wide or one.rounded is not other.rounded
        return
    for coding in (one, other):
        codes = random_codes(coding, 3, 512)
        held = codes.within(both)
        assert held.coding == both
        assert int(held.codes.max()) < 1 << both.bits
        assert np.array_equal(held.decoded(), codes.decoded())
        made = empty_packed(coded_form(both), 3, 512)
        pack_codes(made, 0, codes)
        assert np.array_equal(unpack(made).numpy(), codes.decoded())


@pytest.mark.parametrize("coding", CODINGS)
def test_a_packed_matrix_has_the_size_that_its_form_says(coding: Coding) -> None:
    form = coded_form(coding)
    for num_in in (256, 768):
        assert packed_size(form, 32, num_in).num_bytes == form.num_bytes(32, num_in)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("to_bfloat16", [False, True])
def test_rows_are_looked_up_as_they_are_decoded(coding: Coding, to_bfloat16: bool) -> None:
    codes = random_codes(coding, 37, 512)
    ids = torch.tensor([0, 36, 5, 5, 17] * 5)
    out = torch.empty(len(ids), 512)
    _native.look_up_codes(packed(codes), ids, out, to_bfloat16)
    expected = torch.from_numpy(codes.decoded())[ids]
    assert same_bits(out, expected.bfloat16().float() if to_bfloat16 else expected)


HALVES = Coding(4, 32, 8)


@pytest.mark.parametrize(
    ("changed", "num_in", "message"),
    [
        ({"bits": 7}, 32, "coding.bits: expected 4, 5, 6 or 8, found 7"),
        ({"group": 48}, 48, "coding.group: expected 16, 32"),
        ({"group": 0}, 32, "coding.group: .*found 0"),
        ({"rounded": "float64"}, 32, "coding.rounded: expected float32, float16 or bfloat16"),
        ({}, 40, "num_in: expected a multiple of 32, found 40"),
        ({"scale": "nested"}, 32, "coding.scale: expected nested only of 4 bits by 32"),
    ],
)
def test_an_impossible_coding_is_refused(
    changed: dict[str, Any], num_in: int, message: str
) -> None:
    form = replace(coded_form(HALVES), coding=replace(HALVES, **changed))
    with pytest.raises(ValueError, match=message):
        packed_size(form, 16, num_in)


def test_codes_that_are_not_those_of_the_matrix_are_refused() -> None:
    made, codes = empty_packed(coded_form(HALVES), 16, 64), torch.zeros(16, 64, dtype=torch.uint8)
    scales = torch.zeros(16, 4, dtype=torch.uint8)
    pack_raw = _native.pack_linear_codes
    pack_raw(made, 0, codes, scales, None, None, None)
    with pytest.raises(ValueError, match=r"scales: .*\[16, 4\], found \[16, 8\]"):
        pack_raw(made, 0, codes, scales.repeat(1, 2), None, None, None)
    with pytest.raises(TypeError, match="minimums: expected None"):
        pack_raw(made, 0, codes, scales, scales, None, None)
    with pytest.raises(ValueError, match="first_row: expected 0 to 0"):
        pack_raw(made, 1, codes, scales, None, None, None)
    with pytest.raises(ValueError, match="form: expected one without a coding"):
        _native.pack_linear_rows(made, 0, torch.zeros(16, 64))
    plain = empty_packed(FLOAT32, 16, 64)
    with pytest.raises(ValueError, match="form: expected one with a coding"):
        pack_raw(plain, 0, codes, scales, None, None, None)
    with pytest.raises(ValueError, match=r"ids\[0\]: expected an id below 16, found 16"):
        _native.look_up_codes(made, torch.tensor([16]), torch.empty(1, 64), False)


def test_scales_of_float16_are_read_exactly() -> None:
    """All of them that are finite, denormals included."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    codes = Codes(Coding(4, 16, 8), np.full((len(halves), 16), 9, np.uint8), halves[:, None])
    made = packed(codes)
    expected = torch.from_numpy(halves.astype(np.float32))[:, None]
    out = torch.empty(len(halves), 16)
    _native.look_up_codes(made, torch.arange(len(halves)), out, False)
    assert same_bits(out, expected.repeat(1, 16))
    tiny = replace(codes, coding=Coding(4, 16, 8, rounded=Rounded.FLOAT16), codes=codes.codes - 4)
    tiny = replace(tiny, scales=(halves[:, None].astype(np.float32) / 7).astype(np.float16))
    _native.look_up_codes(packed(tiny), torch.arange(len(halves)), out, False)
    assert same_bits(out, torch.from_numpy(tiny.decoded()))
    for variant in VARIANTS:
        x = torch.zeros(1, 16)
        x[0, 3] = 1
        found = linear(x, made, torch.empty(1, len(halves)), variant=variant)
        assert torch.equal(found, expected.T)
        assert ScaleType.FLOAT16 is codes.coding.scale
