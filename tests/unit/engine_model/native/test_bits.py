"""The promise of the native decoder: bits depend on the sequence alone.

Not on the other rows, the chunks of its prompt, the threads, the blocks, or which rows are sampled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from pdserve.commands.bench.step.neighbours import BusyProcesses
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.coded_rows import decoded
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.plan.forms import BFLOAT16, FLOAT32, FP8, INT8, WeightForm
from pdserve.kv import KvDtype
from tests.matrix import examples, matrix
from tests.unit.engine_model.small_models import (
    Part,
    SmallModel,
    all_logits,
    make_batch,
    random_tokens,
    small_model,
)

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 44,
    "kv_lora_rank": 52,
    "qk_nope_head_dim": 28,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


class Case(NamedTuple):
    dtype: torch.dtype
    form: WeightForm
    has_experts: bool
    kv: KvDtype | None = None  # None: as dtype
    is_latent: bool = False


CASES = [
    Case(dtype, form, has_experts)
    for has_experts in (False, True)
    for dtype, form in (
        (torch.float32, FLOAT32),
        (torch.bfloat16, BFLOAT16),
        (torch.bfloat16, INT8),
    )
] + [
    Case(torch.bfloat16, BFLOAT16, False, KvDtype.INT8),
    Case(torch.bfloat16, INT8, True, KvDtype.FP8),
    Case(torch.bfloat16, FP8, True),
    Case(torch.float32, FLOAT32, False, KvDtype.INT8),
    Case(torch.float32, FLOAT32, True, is_latent=True),
    Case(torch.bfloat16, BFLOAT16, True, is_latent=True),
    Case(torch.bfloat16, INT8, True, KvDtype.FP8, is_latent=True),
]
BLOCK_SIZE = 16
MAX_TOKENS = 160
MAX_BLOCKS = MAX_TOKENS // BLOCK_SIZE


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@cache
def model(case: Case) -> SmallModel:
    """With a window in one layer or experts, and sizes that fill no tile evenly."""
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    fields = EXPERTS if case.has_experts else window
    fields = LATENT if case.is_latent else fields
    return small_model(
        case.dtype, hidden_size=72, intermediate_size=104, attention_bias=True, **fields
    )


@cache
def decoder(case: Case) -> NativeDecoder:
    return model(case).native(case.form)


def kv_cache_of(case: Case, num_blocks: int = 64) -> KvCache:
    return model(case).kv_cache(num_blocks, BLOCK_SIZE, case.kv)


@cache
def alone(case: Case, seed: int) -> Tensor:
    """[MAX_TOKENS, vocab_size], the sequence of this seed by itself in one step."""
    _native.set_num_threads(1)
    tokens = random_tokens(MAX_TOKENS, seed)
    return all_logits(decoder(case), kv_cache_of(case), tokens)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("case", matrix([(one,) for one in CASES], 4))
@settings(max_examples=examples(25))
@given(data=st.data(), num_threads=st.sampled_from([1, 2, 3]))
def test_bits_are_those_of_the_sequence_alone(
    case: Case, data: st.DataObject, num_threads: int
) -> None:
    """Sequences that join, pause and go on in chunks of any size, in any steps together."""
    num_sequences = data.draw(st.integers(1, 4))
    tokens = [random_tokens(MAX_TOKENS, seed) for seed in range(num_sequences)]
    kv_cache = kv_cache_of(case, num_sequences * MAX_BLOCKS + 1)
    blocks = torch.randperm(kv_cache.num_blocks, generator=torch.Generator().manual_seed(1))
    tables = blocks[: num_sequences * MAX_BLOCKS].view(num_sequences, -1).tolist()
    expected = [alone(case, seed) for seed in range(num_sequences)]
    num_done = [0] * num_sequences
    _native.set_num_threads(num_threads)
    for _ in range(data.draw(st.integers(1, 5))):
        parts, rows = [], []
        for i in range(num_sequences):
            count = data.draw(st.sampled_from([0, 1, 1, 2, 3, 15, 16, 17, 40, 75]))
            last = min(num_done[i] + count, MAX_TOKENS)
            if last > num_done[i]:
                parts.append(Part(tokens[i], num_done[i], last, tables[i]))
                rows.append(expected[i][num_done[i] : last])
                num_done[i] = last
        if parts:
            logits = decoder(case).logits(make_batch(parts, BLOCK_SIZE), kv_cache.pool)
            assert logits is not None
            assert same_bits(logits, torch.cat(rows))


@pytest.mark.parametrize("case", matrix([(one,) for one in CASES], 4))
@pytest.mark.parametrize("num_emitted", [1, 15, 16, 60])
def test_kv_of_emitted_tokens_in_one_chunk_is_that_of_step_by_step(
    case: Case, num_emitted: int
) -> None:
    """So a request that goes on elsewhere goes on with the same bits."""
    tokens, blocks = random_tokens(100 + num_emitted, 7), list(range(MAX_BLOCKS))
    stepped, resumed = (kv_cache_of(case, MAX_BLOCKS) for _ in range(2))
    ends = [100, *range(101, len(tokens) + 1)]
    last = Tensor()
    for begin, end in zip([0, *ends], ends, strict=False):
        batch = make_batch([Part(tokens, begin, end, blocks)], BLOCK_SIZE)
        logits = decoder(case).logits(batch, stepped.pool)
        assert logits is not None
        last = logits[-1:].clone()  # the decoder uses its memory again
    at_once = make_batch([Part(tokens, 0, len(tokens), blocks)], BLOCK_SIZE)
    logits = decoder(case).logits(at_once, resumed.pool)
    assert logits is not None
    assert same_bits(last, logits[-1:])
    kv = [kv_cache.pool.view(torch.uint8) for kv_cache in (stepped, resumed)]
    assert torch.equal(*kv)


@pytest.mark.parametrize("case", matrix([(one,) for one in CASES], 3))
@settings(max_examples=examples(25))
@given(sampled=st.sets(st.integers(0, 99), max_size=12))
def test_the_last_layer_of_few_rows_is_that_of_all(case: Case, sampled: set[int]) -> None:
    rows = sorted(sampled)
    kv_cache = kv_cache_of(case, MAX_BLOCKS)
    part = Part(random_tokens(MAX_TOKENS), 0, 100, list(range(MAX_BLOCKS)))
    logits = decoder(case).logits(make_batch([part], sampled=rows), kv_cache.pool)
    if not rows:
        assert logits is None
    else:
        assert logits is not None
        assert same_bits(logits, alone(case, 0)[rows])
    # All keys and values are there, whoever was sampled.
    assert not decoded(kv_cache.pool[:6]).isnan().any()
    following = Part(random_tokens(MAX_TOKENS), 100, 110, list(range(MAX_BLOCKS)))
    logits = decoder(case).logits(make_batch([following]), kv_cache.pool)
    assert logits is not None
    assert same_bits(logits, alone(case, 0)[100:110])


@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["mlp", "experts"])
def test_many_threads_and_rows(fields: dict[str, Any]) -> None:
    """Steps large enough that every kernel is shared out."""
    tokens = random_tokens(1500)
    small = small_model(torch.bfloat16, hidden_size=128, intermediate_size=256, **fields)
    native = small.native()
    found = []
    for num_threads in (1, 2, 4):
        _native.set_num_threads(num_threads)
        found.append(all_logits(native, small.kv_cache(100), tokens))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_busy_neighbours_change_no_bit_and_a_step_returns_the_core_that_was_lent_to_it() -> None:
    case = CASES[1]
    expected, cores = alone(case, 1), os.sched_getaffinity(0)
    _native.set_num_threads(2)
    with BusyProcesses(2, sorted(cores)[:2]) as neighbours, neighbours.busy():
        for _ in range(50):
            tokens = random_tokens(MAX_TOKENS, 1)
            logits = all_logits(decoder(case), kv_cache_of(case), tokens)
            assert same_bits(logits, expected)
            assert os.sched_getaffinity(0) == cores
