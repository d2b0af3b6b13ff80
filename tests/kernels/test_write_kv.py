"""write_kv: what it writes, and that it writes nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve import _native
from pdserve.engine.attention import LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from tests.kernels.cases import DTYPES, Shape, make_case, requests, shapes, strided
from tests.native_attention import NativeAttention


@settings(max_examples=60)
@given(data=st.data(), shape=shapes(), requests=requests(), is_strided=st.booleans())
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
