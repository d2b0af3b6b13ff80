"""write_kv: what it writes, and that it writes nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve import _native
from pdserve.engine.attention import LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.kv.coded_rows import decoded, encoded
from tests.kernels.cases import CODES, DTYPES, Shape, make_case, requests, stored_shapes, strided
from tests.matrix import examples, matrix
from tests.native_attention import NativeAttention


@settings(max_examples=examples(60))
@given(data=st.data(), shape=stored_shapes(), requests=requests(), is_strided=st.booleans())
def test_matches_the_reference(
    data: st.DataObject, shape: Shape, requests: list[tuple[int, int]], is_strided: bool
) -> None:
    case = make_case(shape, requests)
    layer = data.draw(st.integers(0, shape.num_layers - 1))
    size = (case.batch.slot_mapping.numel(), shape.num_kv_heads, shape.head_dim)
    key = strided(size, shape.dtype, is_strided)
    value = strided(size, shape.dtype, is_strided)
    expected, found = case.kv_pool.clone(), case.kv_pool.clone()
    ReferenceAttention().write_kv(expected, layer, key, value, case.batch)
    NativeAttention().write_kv(found, layer, key, value, case.batch)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_tokens_are_split_over_threads(dtype: torch.dtype, num_threads: int) -> None:
    shape = Shape(num_kv_heads=4, head_dim=128, num_layers=1, dtype=dtype)
    case = make_case(shape, [(700, 0)])
    key = torch.randn(700, 4, 128).to(dtype)
    value = torch.randn(700, 4, 128).to(dtype)
    before = _native.num_threads()
    try:
        _native.set_num_threads(num_threads)
        NativeAttention().write_kv(case.kv_pool, 0, key, value, case.batch)
    finally:
        _native.set_num_threads(before)
    slots = case.batch.slot_mapping
    blocks, offsets = slots // shape.block_size, slots % shape.block_size
    assert torch.equal(case.kv_pool[blocks, 0, 0, :, offsets], key)
    assert torch.equal(case.kv_pool[blocks, 0, 1, :, offsets], value)


def test_written_then_attended() -> None:
    """One token sees only itself, so the result is its value."""
    case = make_case(Shape(), [(1, 0)])
    backend = NativeAttention()
    key, value = torch.randn(1, 2, 64), torch.randn(1, 2, 64)
    backend.write_kv(case.kv_pool, 1, key, value, case.batch)
    out = backend.attend(case.query, LayerKv(case.kv_pool, 1, 0.1), case.batch)
    assert torch.equal(out, value.repeat_interleave(2, dim=1))


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", matrix(DTYPES, 1))
@settings(max_examples=examples(100))
@given(row=st.lists(NUMBERS, min_size=1, max_size=70), scale=st.sampled_from([1.0, 1e-41, 0.0]))
def test_codes_are_the_reference_s_bit_by_bit(
    codes: torch.dtype, dtype: torch.dtype, row: list[float], scale: float
) -> None:
    shape = Shape(1, 1, len(row), block_size=1, num_layers=1, dtype=dtype, codes=codes)
    case = make_case(shape, [(1, 0)])
    key = (torch.tensor(row) * scale).to(dtype).view(1, 1, -1)
    NativeAttention().write_kv(case.kv_pool, 0, key, key, case.batch)
    found = case.kv_pool.flatten(0, 1)[case.batch.slot_mapping].view(2, -1)
    assert torch.equal(found, encoded(key, codes).view(1, -1).expand(2, -1))


@pytest.mark.parametrize(("codes", "step"), [(torch.int8, 0.5 / 127), (torch.uint8, 2**-4)])
def test_codes_are_as_near_as_their_bits_allow(codes: torch.dtype, step: float) -> None:
    """Integers to half a step of the largest number; float8 to a 16th of each."""
    numbers = torch.randn(100, 64)
    error = (decoded(encoded(numbers, codes)) - numbers).abs()
    of = numbers.abs().amax(-1, keepdim=True) if codes is torch.int8 else numbers.abs() + 1e-4
    assert (error <= of * step * (1 + 1e-5)).all()


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(codes: torch.dtype, bad: float) -> None:
    case = make_case(Shape(1, 1, 37, codes=codes), [(1, 0)])
    key = torch.randn(1, 1, 37)
    key[0, 0, 36] = bad
    NativeAttention().write_kv(case.kv_pool, 0, key, key, case.batch)
    block, offset = divmod(int(case.batch.slot_mapping[0]), 16)
    assert decoded(case.kv_pool[block, 0, :, 0, offset]).isnan().all()
    assert torch.equal(case.kv_pool[block, 0, 0, 0, offset], encoded(key, codes)[0, 0])
