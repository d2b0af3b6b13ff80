"""What the native decoder promises besides its results: checks, reports, memory, threads."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.native.decoder import NativeDecoder
from tests.unit.engine_model.small_models import (
    Part,
    SmallModel,
    all_logits,
    make_batch,
    random_tokens,
    small_model,
)


@pytest.fixture(scope="module")
def small() -> SmallModel:
    return small_model(num_hidden_layers=3)


@pytest.fixture(scope="module")
def decoder(small: SmallModel) -> NativeDecoder:
    return small.native()


@pytest.fixture
def kv_cache(small: SmallModel) -> KvCache:
    return small.kv_cache(8)


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def prompt(num_tokens: int) -> Part:
    return Part(random_tokens(num_tokens), 0, num_tokens, [3, 1, 2])


def test_what_a_listener_raises_ends_the_step(decoder: NativeDecoder, kv_cache: KvCache) -> None:
    heard = []

    def done(num_layers: int) -> None:
        heard.append(num_layers)
        if num_layers == 2:
            raise LookupError("nobody there")

    batch = make_batch([prompt(20)])
    with pytest.raises(LookupError, match="nobody there"):
        decoder.logits(batch, kv_cache.pool, LayerProgress([1, 2, 3], done))
    assert heard == [1, 2]
    assert kv_cache.pool[3, 2].isnan().all()  # the third layer was not begun
    again = decoder.logits(batch, kv_cache.pool)
    assert again is not None
    assert torch.equal(again, all_logits(decoder, kv_cache, random_tokens(20)))


def test_one_step_at_a_time(decoder: NativeDecoder, kv_cache: KvCache) -> None:
    batch = make_batch([prompt(20)])
    refused = []

    def done(_: int) -> None:
        with pytest.raises(RuntimeError, match="another step of this decoder is running"):
            decoder.logits(batch, kv_cache.pool)
        refused.append(True)

    decoder.logits(batch, kv_cache.pool, LayerProgress([1], done))
    assert refused


def test_other_threads_run_python_during_a_step(decoder: NativeDecoder, kv_cache: KvCache) -> None:
    """The listener waits for another thread, which could not run if the lock were kept."""
    reached, answered = threading.Event(), threading.Event()

    def answer() -> None:
        reached.wait()
        answered.set()

    def done(_: int) -> None:
        reached.set()
        assert answered.wait(timeout=30)

    thread = threading.Thread(target=answer)
    thread.start()
    decoder.logits(make_batch([prompt(20)]), kv_cache.pool, LayerProgress([1], done))
    thread.join()


def test_memory_grows_with_the_largest_step_and_no_more(small: SmallModel) -> None:
    decoder, kv_cache = small.native(), small.kv_cache(8)
    assert decoder.workspace_bytes == 0
    sizes = []
    for num_tokens in (10, 40, 40, 1, 25, 40):
        logits = decoder.logits(make_batch([prompt(num_tokens)]), kv_cache.pool)
        assert logits is not None
        sizes.append((decoder.workspace_bytes, logits.untyped_storage().data_ptr()))
    assert 0 < sizes[0][0] < sizes[1][0]
    assert set(sizes[1:]) == {sizes[1]}


@pytest.mark.usefixtures("num_threads")
def test_workers_sleep_after_a_step(decoder: NativeDecoder, small: SmallModel) -> None:
    _native.set_num_threads(3)
    kv_cache = small.kv_cache(100)
    all_logits(decoder, kv_cache, random_tokens(1500))
    event = threading.Event()
    event.wait(0.01)
    before = _worker_states()
    event.wait(0.1)
    assert len(before) >= 2
    assert _worker_states() == before


def _worker_states() -> dict[str, list[str]]:
    """Of each worker thread: id |-> [state, user ticks, system ticks]."""
    states = {}
    for thread_id in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread_id}/stat") as stat:
            name, _, fields = stat.read().rpartition(")")
        if name.endswith("(pdserve-kernel"):
            split = fields.split()
            states[thread_id] = [split[0], *split[11:13]]
            assert split[0] == "S"
    return states


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


STEP_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("token_ids", torch.tensor([0, 1, 320, 3]), ValueError,
     r"token_ids\[2\]: expected an id below 320, found 320"),
    ("token_ids", torch.tensor([-1, 1, 2, 3]), ValueError, r"token_ids\[0\]: .*found -1"),
    ("token_ids", int32(0, 1, 2, 3), TypeError, "token_ids: expected dtype int64, found int32"),
    ("token_ids", torch.tensor([[0, 1]]), ValueError, "token_ids: expected shape"),
    ("token_ids", torch.tensor([0, 1, 2]), ValueError, r"query_start\[2\]: expected 3"),
    ("query_start", int32(0, 3, 2), ValueError, r"query_start\[2\]: expected at least 3"),
    ("context_lens", int32(2, 17), ValueError, r"context_lens\[0\]: expected at least the 3 rows"),
    ("context_lens", int32(3, 170), ValueError, "block_tables: expected at least 11 columns"),
    ("block_tables", int32(0, 8).view(2, 1), ValueError, r"block_tables\[1\]\[0\]: .*below 8"),
    ("sampled_rows", torch.tensor([2, 4]), ValueError,
     r"sampled_rows\[1\]: expected ascending rows below 4, found 4"),
    ("sampled_rows", torch.tensor([2, 2]), ValueError, r"sampled_rows\[1\]: .*found 2"),
    ("sampled_rows", torch.tensor([-1, 2]), ValueError, r"sampled_rows\[0\]: .*found -1"),
    ("out", torch.zeros(1, 320), ValueError, r"out: expected shape .*= \[2, 320\]"),
    ("out", torch.zeros(2, 320).bfloat16(), TypeError, "out: expected dtype float32"),
    ("kv_pool", torch.zeros(8, 2, 2, 2, 16, 32), ValueError, r"kv_pool: .*\[any, 3, 2, 2, any, 32"),
    ("kv_pool", torch.zeros(8, 3, 2, 2, 16, 32).bfloat16(), TypeError,
     "kv_pool: expected dtype float32, found bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), STEP_ERRORS)
def test_a_step_that_makes_no_sense_is_refused_before_it_begins(
    small: SmallModel,
    kv_cache: KvCache,
    name: str,
    value: Any,
    error: type[Exception],
    message: str,
) -> None:
    arguments = {
        "token_ids": torch.tensor([0, 1, 2, 319]),
        "query_start": int32(0, 3, 4),
        "context_lens": int32(3, 16),
        "block_tables": int32(0, 7).view(2, 1),
        "sampled_rows": torch.tensor([2, 3]),
        "kv_pool": kv_cache.pool,
        "out": torch.zeros(2, 320),
    }
    native = make_native(small)
    with pytest.raises(error, match=message):
        native.logits(**(arguments | {name: value}))
    assert kv_cache.pool.isnan().all()
    kv_cache.pool[7] = 0.0
    native.logits(**arguments)


def make_native(small: SmallModel, **changes: Any) -> Any:
    config = small.config
    arguments = {
        "weights": small.packed(),
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "norm_eps": config.rms_norm_eps,
        "sliding_windows": [0] * config.num_layers,
        "inverse_frequencies": torch.ones(config.head_dim // 2),
        "rope_scale": 1.0,
    }
    return _native.Decoder(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 3}, ValueError, "num_heads: expected a multiple of 2 KV heads, found 3"),
        ({"num_kv_heads": 1}, ValueError, r"layers\[0\].qkv: expected a plain matrix of 192 x 64"),
        ({"head_dim": 31}, ValueError, "head_dim: expected an even number, found 31"),
        ({"num_heads": 0}, ValueError, "num_heads: expected 1 or more, found 0"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps: expected 0 or more"),
        ({"sliding_windows": [0, 0]}, ValueError, "sliding_windows: expected one for each"),
        ({"sliding_windows": [0, -1, 0]}, ValueError, "sliding_windows: .*found -1"),
        ({"inverse_frequencies": torch.ones(15)}, ValueError, "inverse_frequencies: .*found"),
        ({"variant": "mmx"}, ValueError, "variant: expected one of"),
    ],
)
def test_sizes_that_contradict_the_weights_are_refused(
    small: SmallModel, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_native(small, **changes)


def test_weights_of_another_architecture_are_refused(small: SmallModel) -> None:
    packed = small.packed()
    last = packed.layers[-1]
    for change, message in (
        ({"gate_up": last.down}, r"layers\[2\].gate_up: expected a gated matrix of 192 x 64"),
        ({"attention_norm": torch.ones(63)}, r"layers\[2\].attention_norm: expected shape"),
        ({"mlp_norm": torch.ones(64).bfloat16()}, r"layers\[2\].mlp_norm: expected dtype float32"),
        ({"q_norm": None}, r"layers\[2\].k_norm: expected a norm if and only if q_norm"),
    ):
        layers = [*packed.layers[:-1], dataclasses.replace(last, **change)]
        with pytest.raises((TypeError, ValueError), match=message):
            make_native(small, weights=dataclasses.replace(packed, layers=layers))
    with pytest.raises(ValueError, match="lm_head: expected a plain matrix of 320 x 64"):
        make_native(small, weights=dataclasses.replace(packed, lm_head=last.down))


def test_the_decoder_keeps_what_it_reads_alive_and_no_longer(small: SmallModel) -> None:
    packed = small.packed()
    held = [
        weakref.ref(tensor) for tensor in (packed.lm_head.weights, packed.layers[1].down.weights)
    ]
    native = make_native(small, weights=packed)
    del packed
    gc.collect()
    assert all(tensor() is not None for tensor in held)
    del native
    gc.collect()
    assert all(tensor() is None for tensor in held)
