"""rotate_and_write against plain torch, and the promises about bits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from pdserve.engine.kv.coded_rows import encoded
from pdserve.engine.rope import rotate
from tests.kernels.cases import (
    CODES,
    DTYPES,
    EACH_VARIANT,
    Case,
    Shape,
    make_case,
    requests,
    shapes,
)
from tests.matrix import examples

EPS = 1e-5


@dataclass(frozen=True)
class Rows:
    """The fused product of a step, and what turns it."""

    qkv: Tensor  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor] | None  # of queries and keys, each [head_dim]
    cos_sin: Tensor  # [num_tokens, head_dim]


def make_rows(case: Case, *, has_norms: bool, is_strided: bool = False) -> Rows:
    shape = case.shape
    num_tokens = len(case.query)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    padding = 3 if is_strided else 0
    qkv = torch.randn(num_tokens, width + padding).to(shape.dtype)[:, padding:]
    angles = torch.rand(num_tokens, shape.head_dim // 2) * 7
    norms = (torch.randn(shape.head_dim), torch.randn(shape.head_dim)) if has_norms else None
    return Rows(qkv, norms, torch.cat([angles.cos(), angles.sin()], dim=1))


def rotate_and_write(
    rows: Rows, case: Case, kv_pool: Tensor, layer: int = 0, variant: str = ""
) -> None:
    q_norm, k_norm = rows.norms if rows.norms is not None else (None, None)
    _native.rotate_and_write(
        rows.qkv,
        case.shape.num_heads,
        q_norm,
        k_norm,
        EPS,
        rows.cos_sin,
        kv_pool,
        layer,
        case.batch.slot_mapping,
        variant,
    )


def reference(rows: Rows, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64, each [num_tokens, heads, head_dim]."""
    shape = case.shape
    heads = rows.qkv.double().unflatten(1, (-1, shape.head_dim))
    query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    if rows.norms is not None:
        q_norm, k_norm = rows.norms
        query, key = normalised(query) * q_norm, normalised(key) * k_norm
    cos, sin = rows.cos_sin[:, None].double().chunk(2, dim=-1)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def normalised(heads: Tensor) -> Tensor:
    return heads * (heads.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()


def expect_close(found: Tensor, expected: Tensor) -> None:
    """One rounding of the result; where two terms cancel, a few of theirs in float32."""
    rounding = 2**-8 if found.dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.double(), expected, atol=4e-6, rtol=rounding)


def with_even_head_dim(shape: Shape) -> Shape:
    return dataclasses.replace(shape, head_dim=shape.head_dim + shape.head_dim % 2)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@settings(max_examples=examples(40))
@given(
    data=st.data(),
    shape=shapes().map(with_even_head_dim),
    requests=requests(),
    has_norms=st.booleans(),
    is_strided=st.booleans(),
)
def test_every_variant_matches_the_reference(
    variant: str,
    data: st.DataObject,
    shape: Shape,
    requests: list[tuple[int, int]],
    has_norms: bool,
    is_strided: bool,
) -> None:
    case = make_case(shape, requests)
    rows = make_rows(case, has_norms=has_norms, is_strided=is_strided)
    layer = data.draw(st.integers(0, shape.num_layers - 1))
    query, key, value = reference(rows, case)
    untouched = rows.qkv.clone()
    found, expected = case.kv_pool.clone(), case.kv_pool.clone()
    rotate_and_write(rows, case, found, layer, variant)

    q_width = shape.num_heads * shape.head_dim
    expect_close(rows.qkv[:, :q_width].unflatten(1, (-1, shape.head_dim)), query)
    assert torch.equal(rows.qkv[:, q_width:], untouched[:, q_width:])
    slots = case.batch.slot_mapping
    where = (slots // shape.block_size, layer, slice(None), slice(None), slots % shape.block_size)
    written = found[where]  # [num_tokens, 2, num_kv_heads, head_dim]
    expect_close(written[:, 0], key)
    assert torch.equal(written[:, 1], value.to(shape.dtype))
    expected[where] = written
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_of_a_token_are_its_own(num_threads: int, dtype: torch.dtype, variant: str) -> None:
    """Many tokens, shared among threads, against one at a time."""
    shape = Shape(num_kv_heads=4, group_size=3, head_dim=64, num_layers=1, dtype=dtype)
    case = make_case(shape, [(130, 0)])
    rows = make_rows(case, has_norms=True)
    one_by_one = dataclasses.replace(rows, qkv=rows.qkv.clone())
    together, apart = case.kv_pool.clone(), case.kv_pool.clone()
    before = _native.num_threads()
    try:
        _native.set_num_threads(num_threads)
        rotate_and_write(rows, case, together, 0, variant)
    finally:
        _native.set_num_threads(before)
    for token in range(130):
        one = slice(token, token + 1)
        batch = dataclasses.replace(
            case.batch, slot_mapping=case.batch.slot_mapping[one].contiguous()
        )
        row = Rows(one_by_one.qkv[one], rows.norms, rows.cos_sin[one])
        rotate_and_write(row, dataclasses.replace(case, batch=batch), apart, 0, variant)
    assert torch.equal(rows.qkv, one_by_one.qkv)
    torch.testing.assert_close(together, apart, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("variant", EACH_VARIANT)
def test_a_token_of_nan_spoils_no_other(variant: str) -> None:
    case = make_case(Shape(head_dim=32, dtype=torch.bfloat16), [(3, 0)])
    rows = make_rows(case, has_norms=True)
    clean = dataclasses.replace(rows, qkv=rows.qkv.clone())
    rotate_and_write(clean, case, case.kv_pool.clone(), 0, variant)
    rows.qkv[1] = float("nan")
    rotate_and_write(rows, case, case.kv_pool, 0, variant)
    assert rows.qkv[1].isnan().all()
    assert torch.equal(rows.qkv[0::2], clean.qkv[0::2])


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("codes", CODES)
@settings(max_examples=examples(15))
@given(shape=shapes().map(with_even_head_dim), requests=requests(), has_norms=st.booleans())
def test_codes_are_those_of_the_rounded_keys_and_values(
    variant: str,
    codes: torch.dtype,
    shape: Shape,
    requests: list[tuple[int, int]],
    has_norms: bool,
) -> None:
    case = make_case(shape, requests)
    rows = make_rows(case, has_norms=has_norms)
    again = dataclasses.replace(rows, qkv=rows.qkv.clone())
    plain, coded = case.kv_pool.clone(), encoded(case.kv_pool, codes)
    rotate_and_write(rows, case, plain, variant=variant)
    rotate_and_write(again, case, coded, variant=variant)
    assert torch.equal(coded, encoded(plain, codes))
    width = shape.num_heads * shape.head_dim
    assert torch.equal(again.qkv[:, :width], rows.qkv[:, :width])
