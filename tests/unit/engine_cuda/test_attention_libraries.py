"""FlashInfer and FlashAttention 3 are told what they want to hear, as far as one can know here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from pdserve.engine.attention import AttentionBatch, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.flash_attention import FlashAttention
from pdserve.engine.cuda.attention.flash_infer import FlashInferAttention, ragged_blocks
from tests.kernels.cases import Shape, make_case
from tests.matrix import examples
from tests.unit.engine_cuda import attention_libraries as libraries
from tests.unit.engine_cuda.checks import attend, check_attention, check_place

REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=3)
WINDOWS = st.one_of(st.none(), st.integers(1, 60))


def flashinfer() -> FlashInferAttention:
    return FlashInferAttention(libraries, torch.device("cpu"))


@pytest.mark.parametrize("open_backend", [flashinfer, lambda: FlashAttention(libraries)])
@settings(max_examples=examples(15))
@given(requests=REQUESTS, window=WINDOWS, block_size=st.integers(1, 32))
def test_the_result_is_the_reference_s(open_backend, requests, window, block_size) -> None:
    shape = Shape(2, 3, 64, block_size, dtype=torch.bfloat16)
    case = make_case(shape, requests)
    check_attention(open_backend(), case, window, layer=1)


@pytest.mark.parametrize(
    "open_backend", [flashinfer, lambda: FlashAttention(libraries), ReferenceAttention]
)
def test_the_result_goes_where_it_is_wanted(open_backend) -> None:
    case = make_case(Shape(2, 3, 64, dtype=torch.bfloat16), [(3, 40), (1, 3)])
    check_place(open_backend(), case)


def test_flash_attention_s_decode_steps() -> None:
    case = make_case(Shape(2, 3, 64, dtype=torch.bfloat16), [(1, 40), (1, 3)])
    backend = FlashAttention(libraries)
    kv = LayerKv(case.kv_pool, 0, case.shape.scale, 7)
    found = backend.attend_decode(case.query, kv, case.batch)
    assert torch.equal(found, attend(backend, case, 7))


def test_a_batch_is_planned_once_for_each_window() -> None:
    case = make_case(Shape(dtype=torch.bfloat16), [(5, 40), (1, 3)])
    other = make_case(Shape(dtype=torch.bfloat16), [(5, 40), (1, 3)], seed=1)
    backend = flashinfer()
    before = libraries.BatchPrefillWithPagedKVCacheWrapper.num_plans
    for layer in (0, 1):
        for window in (None, 7):
            attend(backend, case, window, layer)
    assert libraries.BatchPrefillWithPagedKVCacheWrapper.num_plans == before + 2
    first = attend(backend, other)
    assert libraries.BatchPrefillWithPagedKVCacheWrapper.num_plans == before + 3
    check_attention(backend, other, None)
    assert torch.equal(attend(backend, other), first)


def test_plans_read_the_host_s_copy_of_the_batch() -> None:
    """Nothing is fetched from the GPU: there is nothing."""
    case = make_case(Shape(dtype=torch.bfloat16), [(5, 40), (1, 3)])
    gone = torch.empty(0, dtype=torch.int32, device="meta")
    on_gpu = AttentionBatch(gone, gone, gone, gone, on_host=case.batch)
    expected = attend(flashinfer(), case)
    assert torch.equal(attend(flashinfer(), replace(case, batch=on_gpu)), expected)


def test_blocks_without_the_places_behind_each_context() -> None:
    case = make_case(Shape(block_size=16), [(1, 15), (3, 30), (1, 32)])
    starts, block_ids, last_lens = ragged_blocks(case.batch, 16)
    tables = case.batch.block_tables
    assert starts.tolist() == [0, 1, 4, 7]
    of_each = [tables[0, :1], tables[1, :3], tables[2, :3]]
    assert torch.equal(block_ids, torch.cat(of_each))
    assert last_lens.tolist() == [16, 1, 1]
