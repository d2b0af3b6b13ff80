"""Packing: what a packed matrix stands for, piece by piece, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from pdserve.engine.layers import quantised
from pdserve.engine.native.linear import (
    PackedLinear,
    aligned_bytes,
    empty_packed,
    pack,
    pack_rows,
    packed_size,
)
from pdserve.engine.plan.forms import BFLOAT16, FLOAT16, FLOAT32, FP8, INT8, WeightForm
from tests.kernels.linear_cases import DTYPES, WEIGHT_FORMS
from tests.matrix import examples, matrix
from tests.unpack import unpack


def same_memory(a: PackedLinear, b: PackedLinear) -> bool:
    pairs = [(a.weights, b.weights), (a.scales, b.scales), (a.bias, b.bias)]
    return all(p is q if p is None or q is None else torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("form", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dtype", matrix([torch.bfloat16, torch.float32, torch.float16], 1))
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), matrix([(2, 1), (74, 33), (32, 16), (96, 130)], 2))
def test_unpacked_is_what_was_packed(
    form: WeightForm, dtype: torch.dtype, is_gated: bool, num_out: int, num_in: int
) -> None:
    weight = torch.randn(num_out, num_in).to(dtype)
    found = unpack(pack(weight, form=form, is_gated=is_gated))
    stored = torch.float32 if form is FLOAT32 else torch.bfloat16
    assert torch.equal(found, weight.to(stored).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_int8_is_the_nearest_of_255_values(dtype: torch.dtype, is_gated: bool) -> None:
    weight = (torch.randn(74, 33) * torch.logspace(-9, 9, 74)[:, None]).to(dtype)
    weight[5] = 0
    found = unpack(pack(weight, form=INT8, is_gated=is_gated))
    largest = weight.float().abs().amax(1, keepdim=True)
    scale = largest / 127
    steps = torch.where(scale > 0, weight.float() / scale, 0).round()
    assert torch.equal(found, steps * scale)
    assert steps.abs().max() == 127
    assert bool(((found - weight.float()).abs() <= largest / 253).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_fp8_is_what_torch_rounds_to(dtype: torch.dtype, is_gated: bool) -> None:
    """Of each row as much of its range as float8 has, and small numbers with fewer digits."""
    weight = torch.randn(74, 33) * torch.logspace(-9, 9, 74)[:, None]
    weight = (weight * torch.logspace(-5, 0, 33)).to(dtype)
    weight[5] = 0
    codes, scales = quantised(weight, torch.float8_e4m3fn)
    found = unpack(pack(weight, form=FP8, is_gated=is_gated))
    assert torch.equal(found, codes.float() * scales[:, None])
    assert len(codes.view(torch.uint8).unique()) > 200, "of 253"


def test_int8_of_numbers_that_have_lost_digits() -> None:
    """A scale of one bit: 190 / 127 of the smallest number there is."""
    weight = torch.full((1, 4), 190 * 2.0**-149)
    found = unpack(pack(weight, form=INT8))
    assert bool((found == 127 * 2.0**-149).all())


@settings(max_examples=examples(60))
@given(
    form=st.sampled_from(WEIGHT_FORMS),
    is_gated=st.booleans(),
    num_out=st.integers(1, 60).map(lambda n: 2 * n),
    num_in=st.integers(1, 40),
    data=st.data(),
)
def test_a_matrix_may_be_packed_in_any_pieces(
    form: WeightForm, is_gated: bool, num_out: int, num_in: int, data: st.DataObject
) -> None:
    """Every byte is the same, whatever the memory held before."""
    weight, bias = torch.randn(num_out, num_in), torch.randn(num_out)
    whole = pack(weight, bias, form=form, is_gated=is_gated)
    pieces = empty_packed(form, num_out, num_in, is_gated=is_gated, has_bias=True)
    pieces.weights.fill_(0xFF)
    if pieces.scales is not None:
        pieces.scales.fill_(7.0)
    cuts = sorted({0, num_out, *data.draw(st.lists(st.integers(0, num_out), max_size=4))})
    ranges = data.draw(st.permutations(list(pairwise(cuts))))
    for first, last in ranges:
        pack_rows(pieces, first, weight[first:last], bias[first:last])
    assert same_memory(pieces, whole)


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_rows_of_a_larger_tensor(form: WeightForm) -> None:
    wide = torch.randn(50, 100)
    rows = wide[3:40, 7:60]
    assert same_memory(pack(rows, form=form), pack(rows.contiguous(), form=form))


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_the_threads_make_no_difference(form: WeightForm) -> None:
    weight = torch.randn(500, 33)
    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        one = pack(weight, form=form)
        _native.set_num_threads(3)
        assert same_memory(pack(weight, form=form), one)
    finally:
        _native.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [INT8, FP8])
def test_codes_refuse_what_is_not_finite(
    form: WeightForm, dtype: torch.dtype, value: float
) -> None:
    weight = torch.randn(40, 9).to(dtype)
    weight[33, 4] = value
    with pytest.raises(ValueError, match=r"rows: expected finite values.* in row 3[2-9]"):
        pack(weight, form=form)
    pack(weight, form=BFLOAT16)


def test_packed_rows_fill_lanes_and_cache_lines() -> None:
    assert packed_size(FLOAT32, 17, 3).num_bytes == 2 * 3 * 64
    assert packed_size(BFLOAT16, 17, 3).num_bytes == 2 * 2 * 64
    assert packed_size(INT8, 17, 3).num_bytes == 2 * 16 * 32  # whole blocks
    assert packed_size(INT8, 17, 33).num_bytes == 2 * 16 * 64
    assert packed_size(INT8, 17, 5).num_lanes == 32
    assert packed_size(BFLOAT16, 34, 3, is_gated=True).num_lanes == 64


def test_a_bias_that_has_no_room_or_is_missing() -> None:
    weight, bias = torch.zeros(16, 4), torch.zeros(16)
    with pytest.raises(ValueError, match="bias: expected none"):
        pack_rows(empty_packed(BFLOAT16, 16, 4), 0, weight, bias)
    with pytest.raises(ValueError, match="bias: expected one"):
        pack_rows(empty_packed(BFLOAT16, 16, 4, has_bias=True), 0, weight)


@pytest.mark.parametrize("shape", [(1,), (15,), (17,), (16, 1), ()])
def test_a_bias_of_another_size_is_refused_and_nothing_packed(shape: tuple[int, ...]) -> None:
    packed = empty_packed(BFLOAT16, 32, 4, has_bias=True)
    with pytest.raises(ValueError, match=r"bias: expected shape \[num_rows\] = \[16\], found"):
        pack_rows(packed, 0, torch.ones(16, 4), torch.ones(shape))
    assert not packed.weights.any()


def parts(**changes: Any) -> SimpleNamespace:
    """A gated int8 matrix of [64, 10] that works, changed."""
    works = {
        "form": INT8,
        "num_out": 64,
        "num_in": 10,
        "is_gated": True,
        "weights": aligned_bytes(4 * 512),
        "scales": torch.zeros(64),
        "bias": None,
    }
    return SimpleNamespace(**{**works, **changes})


def misaligned(num_bytes: int) -> Tensor:
    return aligned_bytes(num_bytes + 8)[8:]


MATRIX_ERRORS: list[tuple[SimpleNamespace, type[Exception], str]] = [
    (parts(form=FLOAT16), ValueError, "form: expected one of float32, .*fp8, found float16"),
    (parts(num_out=63), ValueError, "num_out: expected an even number.*found 63"),
    (parts(num_out=0), ValueError, "at least 1.*found 0 and 10"),
    (parts(num_in=-1), ValueError, "found 64 and -1"),
    (parts(num_in=2**40), ValueError, "at most"),
    (parts(weights=aligned_bytes(4 * 512 - 1)), ValueError,
     r"packed.weights: expected shape \[packed bytes\] = \[2048\], found \[2047\]"),
    (parts(weights=torch.zeros(2048, dtype=torch.int32)), TypeError, "packed.weights: .*uint8"),
    (parts(weights=misaligned(2048)), ValueError, "packed.weights: .*aligned to 64.*remainder 8"),
    (parts(scales=None), TypeError, "packed.scales: expected a tensor, as the weights are int8"),
    (parts(scales=torch.zeros(63)), ValueError, r"packed.scales: .*\[64\], found \[63\]"),
    (parts(bias=torch.zeros(64).double()), TypeError, "packed.bias: expected dtype float32"),
]  # fmt: skip


def call_linear(packed: SimpleNamespace, **changes: Any) -> None:
    works = {
        "x": torch.zeros(3, 10),
        "packed": packed,
        "out": torch.zeros(3, 32),
        "result": "gated_silu",
    }
    _native.linear(**{**works, **changes})


@pytest.mark.parametrize(("packed", "error", "message"), MATRIX_ERRORS)
def test_a_matrix_is_refused(packed: SimpleNamespace, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call_linear(packed)
    with pytest.raises(error, match=message):
        _native.pack_linear_rows(packed, 0, torch.zeros(64, 10))  # type: ignore[arg-type]


LINEAR_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(3, 10, dtype=torch.float16)}, TypeError, "x: expected dtype float32 or"),
    ({"x": torch.zeros(3, 11)}, ValueError, r"x: .*\[any, 10\], found \[3, 11\]"),
    ({"x": torch.zeros(10, 3).T}, ValueError, "x: expected a contiguous last dimension"),
    ({"out": torch.zeros(2, 32)}, ValueError, r"out: .*\[3, 32\], found \[2, 32\]"),
    ({"out": torch.zeros(3, 64)}, ValueError, r"found \[3, 64\]"),
    ({"out": torch.zeros(32, 3).T}, ValueError, "out: expected a contiguous last dimension"),
    ({"out": torch.zeros(3, 32).bfloat16()}, TypeError, "out: expected dtype float32, that of x"),
    ({"result": "store"}, ValueError, "result: expected a gated one, as"),
    ({"result": "multiply"}, ValueError, "result: expected store, .*found multiply"),
    ({"variant": "sse9"}, ValueError, "variant"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), LINEAR_ERRORS)
def test_linear_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call_linear(parts())
    with pytest.raises(error, match=message):
        call_linear(parts(), **changes)


def test_a_matrix_that_is_not_gated_refuses_gated_silu() -> None:
    with pytest.raises(ValueError, match="result: expected another, for this matrix"):
        call_linear(parts(is_gated=False))


PACK_ERRORS: list[tuple[int, Tensor, type[Exception], str]] = [
    (0, torch.zeros(64, 10, dtype=torch.float16), TypeError, "rows: expected dtype float32 or"),
    (0, torch.zeros(64, 9), ValueError, r"rows: .*\[any, 10\], found \[64, 9\]"),
    (0, torch.zeros(10, 64).T, ValueError, "rows: expected a contiguous last dimension"),
    (-1, torch.zeros(1, 10), ValueError, "first_row: expected 0 to 63.*found -1"),
    (60, torch.zeros(5, 10), ValueError, "first_row: expected 0 to 59, for 5 rows of 64, found 60"),
]  # fmt: skip


@pytest.mark.parametrize(("first_row", "rows", "error", "message"), PACK_ERRORS)
def test_packing_refuses(
    first_row: int, rows: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _native.pack_linear_rows(parts(), first_row, rows)  # type: ignore[arg-type]
