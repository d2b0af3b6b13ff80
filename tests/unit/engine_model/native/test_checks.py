"""Every check of the native decoder: the error's type, and that it says what was expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from tests.unit.engine_model.small_models import SmallModel, make_native, small_model


@pytest.fixture(scope="module")
def small() -> SmallModel:
    return small_model(num_hidden_layers=3)


@pytest.fixture
def kv_cache(small: SmallModel) -> KvCache:
    return small.kv_cache(8)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


STEP_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("token_ids", torch.tensor([0, 1, 320, 3]), ValueError,
     r"token_ids\[2\]: expected an id below 320, found 320"),
    ("token_ids", torch.tensor([-1, 1, 2, 3]), ValueError, r"token_ids\[0\]: .*found -1"),
    ("token_ids", int32(0, 1, 2, 3), TypeError, "token_ids: expected dtype int64, found int32"),
    ("token_ids", torch.tensor([[0, 1]]), ValueError, "token_ids: expected shape"),
    ("token_ids", torch.tensor([0, 1, 2]), ValueError, r"query_start\[2\]: expected 3"),
    ("positions", torch.tensor([0, -2, -3, 14]), ValueError, r"positions\[3\]: expected 15 or -16"),
    ("positions", torch.tensor([0, 1, 2]), ValueError, "positions: expected shape"),
    ("query_start", int32(0, 3, 2), ValueError, r"query_start\[2\]: expected at least 3"),
    ("context_lens", int32(2, 17), ValueError, r"context_lens\[0\]: expected at least the 3 rows"),
    ("context_lens", int32(3, 170), ValueError, "block_tables: expected at least 11 columns"),
    ("block_tables", int32(0, 8).view(2, 1), ValueError, r"block_tables\[1\]\[0\]: .*below 8"),
    ("sampled_rows", torch.tensor([2, 4]), ValueError,
     r"sampled_rows\[1\]: expected a row from 3 to 3, found 4"),
    ("sampled_rows", torch.tensor([2, 2]), ValueError, r"sampled_rows\[1\]: .*found 2"),
    ("sampled_rows", torch.tensor([-1, 2]), ValueError, r"sampled_rows\[0\]: .*found -1"),
    ("out", torch.zeros(1, 320), ValueError, r"out: expected shape .*= \[2, 320\]"),
    ("out", torch.zeros(2, 320).bfloat16(), TypeError, "out: expected dtype float32"),
    ("state_rows", torch.tensor([0, 4]), ValueError,
     r"state_rows\[1\]: expected a row from 1 to 3, found 4"),
    ("state_rows", None, TypeError, "state_rows"),
    ("states_out", torch.zeros(2, 63), ValueError, r"states_out: expected shape .*= \[2, 64\]"),
    ("states_out", torch.zeros(2, 64).bfloat16(), TypeError, "states_out: expected dtype float32"),
    ("kv_pool", torch.zeros(8, 2, 2, 2, 16, 32), ValueError, r"kv_pool: .*\[any, 3, 2, 2, any, 32"),
    ("kv_pool", torch.zeros(8, 3, 2, 2, 16, 32).bfloat16(), TypeError,
     "kv_pool: expected dtype float32 or int8 or uint8, found bfloat16"),
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
        "positions": torch.tensor([0, -2, -3, 15]),  # -1 - position: of a long request
        "query_start": int32(0, 3, 4),
        "context_lens": int32(3, 16),
        "block_tables": int32(0, 7).view(2, 1),
        "sampled_rows": torch.tensor([2, 3]),
        "kv_pool": kv_cache.pool,
        "out": torch.zeros(2, 320),
        "state_rows": torch.tensor([0, 3]),
        "states_out": torch.zeros(2, 64),
    }
    native = make_native(small)
    with pytest.raises(error, match=message):
        native.logits(**(arguments | {name: value}))
    assert kv_cache.pool.isnan().all()
    kv_cache.pool[7] = 0.0
    native.logits(**arguments)


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
        ({"inverse_frequencies": torch.ones(2, 1, 15)}, ValueError, "inverse_frequencies: .*found"),
        ({"rope_scales": [1.0, 2.0]}, ValueError, "inverse_frequencies: .*found"),
        ({"layer_ropes": [0, 0]}, ValueError, "layer_ropes: expected 3, one for each"),
        ({"layer_ropes": [0, 1, 0]}, ValueError, "layer_ropes: expected of 1 ropes, found 1"),
        (
            {"activation": "relu"},
            ValueError,
            "activation: expected silu, gelu_tanh or clamped, found",
        ),
        ({"attention_scale": 0.0}, ValueError, "a scale: expected a finite number above 0"),
        ({"logit_cap": -1.0}, ValueError, "a cap: expected a finite number above 0"),
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
    norms, matrices, down = last.norms, last.matrices, last.matrices["down"]
    for change, message in (
        (
            {"matrices": matrices | {"gate_up": down}},
            r"layers\[2\].gate_up: expected a gated matrix of 192 x 64",
        ),
        (
            {"matrices": {"down": down}},
            r"layers\[2\].qkv: expected one, found none",
        ),
        (
            {"matrices": matrices | {"router": down}},
            r"layers\[2\].matrices: expected 4 that this decoder computes with, found .*router",
        ),
        (
            {"norms": norms | {"attention_norm": torch.ones(63)}},
            r"layers\[2\].attention_norm: expected shape",
        ),
        (
            {"norms": norms | {"mlp_norm": torch.ones(64).bfloat16()}},
            r"layers\[2\].mlp_norm: expected dtype float32",
        ),
        (
            {"norms": {name: norm for name, norm in norms.items() if name != "q_norm"}},
            r"layers\[2\].k_norm: expected a norm if and only if q_norm",
        ),
        (
            {"norms": norms | {"post_norm": torch.ones(64)}},
            r"layers\[2\].norms: expected 4 that this decoder computes with, found .*post_norm",
        ),
        ({"norms": {}}, r"layers\[2\].attention_norm: expected one, or one behind, found neither"),
    ):
        layers = [*packed.layers[:-1], dataclasses.replace(last, **change)]
        with pytest.raises((TypeError, ValueError), match=message):
            make_native(small, weights=dataclasses.replace(packed, layers=layers))
    with pytest.raises(ValueError, match="lm_head: expected a plain matrix of 320 x 64"):
        make_native(small, weights=dataclasses.replace(packed, lm_head=down))
