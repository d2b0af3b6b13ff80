"""What the native decoder promises besides its results: reports, memory, threads."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve import _native
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.native.decoder import NativeDecoder
from tests.unit.engine_model.small_models import (
    Part,
    SmallModel,
    all_logits,
    make_batch,
    make_native,
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


def test_rows_of_logits_that_steps_need_no_more_are_let_go(small: SmallModel) -> None:
    decoder, kv_cache = small.native(), small.kv_cache(8)
    part, row_bytes = prompt(40), 4 * small.config.vocab_size
    rows, wide = [], decoder.logits(make_batch([part]), kv_cache.pool)
    assert wide is not None
    expected = wide[-1].clone()
    for _ in range(600):
        logits = decoder.logits(make_batch([part], sampled=[39]), kv_cache.pool)
        assert logits is not None
        assert torch.equal(logits[0], expected)
        rows.append(logits.untyped_storage().nbytes() // row_bytes)
    assert (rows[0], rows[-1]) == (40, 1)
    assert rows == sorted(rows, reverse=True)


@pytest.mark.usefixtures("num_threads")
def test_workers_sleep_after_a_step(decoder: NativeDecoder, small: SmallModel) -> None:
    _native.set_num_threads(3)
    kv_cache = small.kv_cache(100)
    all_logits(decoder, kv_cache, random_tokens(1500))
    event = threading.Event()
    end_s = time.monotonic() + 30
    # On a busy machine a worker may wait for a core before it can go to sleep.
    while any(state != "S" for state, *_ in _worker_states().values()):
        assert time.monotonic() < end_s, "workers do not go to sleep"
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
    return states


def test_the_decoder_keeps_what_it_reads_alive_and_no_longer(small: SmallModel) -> None:
    packed = small.packed()
    held = [
        weakref.ref(tensor)
        for tensor in (packed.lm_head.weights, packed.layers[1].matrices["down"].weights)
    ]
    native = make_native(small, weights=packed)
    del packed
    gc.collect()
    assert all(tensor() is not None for tensor in held)
    del native
    gc.collect()
    assert all(tensor() is None for tensor in held)


def test_what_becomes_of_the_weights_object_makes_no_difference(small: SmallModel) -> None:
    def loose(frozen: Any) -> SimpleNamespace:
        fields = dataclasses.fields(frozen)
        return SimpleNamespace(**{field.name: getattr(frozen, field.name) for field in fields})

    weights = loose(small.packed())
    weights.layers = [loose(layer) for layer in weights.layers]
    layer = weights.layers[1]
    down = layer.matrices["down"] = loose(layer.matrices["down"])
    places = [(vars(weights), "embedding"), (vars(weights), "final_norm")]
    places += [(layer.norms, "mlp_norm"), (vars(down), "weights")]
    for owner, name in places:
        owner[name] = owner[name].clone()  # held by nobody else
    held = [weakref.ref(owner[name]) for owner, name in places]
    native = make_native(small, weights=weights)
    for owner, name in places:
        owner[name] = None
    gc.collect()
    assert all(tensor() is not None for tensor in held)
    del native
    gc.collect()
    assert all(tensor() is None for tensor in held)
