"""Every check of the launchers: the error's type, and that it says what was expected and found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve import _native
from tests.kernels.cases import Shape, make_case
from tests.matrix import matrix


def attention_arguments() -> dict[str, Any]:
    """What works: two requests (a chunk of 3 after 17 tokens, one decode step after 4)."""
    case = make_case(Shape(), [(3, 17), (1, 4)])
    return {
        "query": case.query,
        "kv_pool": case.kv_pool,
        "layer": 1,
        "query_start": case.batch.query_start,
        "context_lens": case.batch.context_lens,
        "block_tables": case.batch.block_tables,
        "scale": 0.125,
        "sliding_window": 0,
        "out": torch.empty_like(case.query),
    }


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def transposed(tensor: Tensor) -> Tensor:
    """Same shape, but the last dimension is not the contiguous one."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


ATTENTION_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("query", [1.0], TypeError, "query: expected a CPU tensor, found list"),
    ("query", torch.zeros(4, 4, 64, dtype=torch.float16), TypeError,
     "query: expected dtype float32, that of kv_pool, found float16"),
    ("query", torch.zeros(4, 4, 64, dtype=torch.bfloat16), TypeError, "found bfloat16"),
    ("query", torch.zeros(4, 256), ValueError,
     r"query: expected shape \[num_tokens, num_heads, head_dim\] = \[any, any, 64\], "
     r"found \[4, 256\]"),
    ("query", torch.zeros(4, 4, 32), ValueError, r"found \[4, 4, 32\]"),
    ("query", torch.zeros(4, 3, 64), ValueError, "multiple of kv_pool's 2 KV heads, found 3"),
    ("query", torch.zeros(4, 0, 64), ValueError, "found 0"),
    ("query", transposed(torch.zeros(4, 4, 64)), ValueError, "query: .*contiguous last dimension"),
    ("query", torch.zeros(4, 4, 64, device="meta"), TypeError, "expected a dense CPU tensor"),
    ("query", torch.zeros(5, 4, 64), ValueError, r"out: expected shape .*\[5, 4, 64\]"),
    ("kv_pool", torch.zeros(4, 2, 2, 2, 16, 64, dtype=torch.float64), TypeError,
     "kv_pool: expected dtype float32 or bfloat16 or int8 or uint8, found float64"),
    ("kv_pool", torch.zeros(4, 2, 3, 2, 16, 64), ValueError,
     "kv_pool: expected 1 or 2 planes, found 3"),
    ("kv_pool", torch.zeros(4, 2, 2, 16, 64), ValueError, "kv_pool: expected shape"),
    ("kv_pool", torch.zeros(4, 2, 2, 2, 0, 64), ValueError, "kv_pool: .*found 2, 0 and 64"),
    ("kv_pool", torch.zeros(0, 2, 2, 2, 2**32, 64), ValueError, r"kv_pool: .*below 2\*\*31"),
    ("kv_pool", transposed(torch.zeros(4, 2, 2, 2, 16, 64)), ValueError,
     "kv_pool: expected contiguous memory"),
    ("layer", 2, ValueError, "layer: expected 0 to 1, found 2"),
    ("layer", -1, ValueError, "layer: expected 0 to 1, found -1"),
    ("query_start", torch.tensor([0, 3, 4]), TypeError,
     "query_start: expected dtype int32, found int64"),
    ("query_start", int32(0, 4), ValueError, r"query_start: .*= \[3\], found \[2\]"),
    ("query_start", int32(0, 0, 3, 0, 4, 0)[::2], ValueError, "query_start: expected contiguous"),
    ("query_start", int32(1, 3, 4), ValueError, r"query_start\[0\]: expected 0, found 1"),
    ("query_start", int32(0, 5, 4), ValueError,
     r"query_start\[2\]: expected at least 5, the entry before, found 4"),
    ("query_start", int32(0, 3, 5), ValueError,
     r"query_start\[2\]: expected 4, the rows of query, found 5"),
    ("context_lens", torch.tensor([20, 5]), TypeError, "context_lens: expected dtype int32"),
    ("context_lens", int32(20, 5, 5), ValueError, "query_start: expected shape"),
    ("context_lens", int32(20, 0, 5, 0)[::2], ValueError, "context_lens: expected contiguous"),
    ("context_lens", int32(20, 5).view(1, 2), ValueError, "context_lens: expected shape"),
    ("context_lens", int32(2, 5), ValueError,
     r"context_lens\[0\]: expected at least the 3 rows of the request, found 2"),
    ("context_lens", int32(20, -1), ValueError, r"context_lens\[1\]: .*found -1"),
    ("context_lens", int32(49, 5), ValueError,
     r"block_tables: expected at least 4 columns for context_lens\[0\] = 49 and block size 16, "
     "found 3"),
    ("block_tables", torch.zeros(2, 3, dtype=torch.int64), TypeError, "block_tables: .*int32"),
    ("block_tables", torch.zeros(1, 3).int(), ValueError, r"block_tables: .*\[2, any\], found"),
    ("block_tables", torch.zeros(3, 2).int().T, ValueError, "block_tables: .*contiguous last"),
    ("block_tables", int32(0, 5, 0, 0, 0, 0).view(2, 3), ValueError,
     r"block_tables\[0\]\[1\]: expected a block id below 5, found 5"),
    ("block_tables", int32(0, 1, 0, -1, 0, 0).view(2, 3), ValueError,
     r"block_tables\[1\]\[0\]: expected a block id below 5, found -1"),
    ("scale", 0.0, ValueError, "scale: expected a finite number above 0, found 0"),
    ("scale", float("nan"), ValueError, "scale: .*found nan"),
    ("scale", float("inf"), ValueError, "scale: .*found inf"),
    ("sliding_window", -1, ValueError, "sliding_window: .*found -1"),
    ("sliding_window", 2**40, ValueError, "sliding_window"),
    ("out", torch.zeros(4, 4, 64, dtype=torch.bfloat16), TypeError, "out: expected dtype float32"),
    ("out", torch.zeros(4, 4, 32), ValueError, "out: expected shape that of query"),
    ("out", torch.zeros(4, 4, 65)[:, :, :64], ValueError, "out: expected contiguous memory"),
    ("rows", int32(0), TypeError, "rows: expected dtype int64, found int32"),
    ("rows", torch.tensor([[0]]), ValueError, "rows: expected shape"),
    ("rows", torch.arange(4)[::2], ValueError, "rows: expected contiguous"),
    ("rows", torch.tensor([0, 4]), ValueError, r"rows\[1\]: expected a row from 1 to 3, found 4"),
    ("rows", torch.tensor([2, 2]), ValueError, r"rows\[1\]: expected a row from 3 to 3, found 2"),
    ("rows", torch.tensor([-1]), ValueError, r"rows\[0\]: .*found -1"),
    ("variant", "sse9", ValueError, "variant: expected one of .*portable.*, found sse9"),
]  # fmt: skip


def test_the_arguments_work_as_they_are() -> None:
    _native.paged_attention(**attention_arguments())


@pytest.mark.parametrize(("name", "value", "error", "message"), matrix(ATTENTION_ERRORS, 12))
def test_attention_refuses(name: str, value: object, error: type[Exception], message: str) -> None:
    arguments = attention_arguments()
    before = arguments["out"].fill_(7.0).clone()
    arguments[name] = value
    with pytest.raises(error, match=message):
        _native.paged_attention(**arguments)
    if name != "out":
        assert torch.equal(arguments["out"], before)


def write_arguments() -> dict[str, Any]:
    case = make_case(Shape(), [(3, 17), (1, 4)])
    return {
        "kv_pool": case.kv_pool.nan_to_num(),
        "layer": 1,
        "key": torch.zeros(4, 2, 64),
        "value": torch.zeros(4, 2, 64),
        "slot_mapping": torch.tensor([5, 6, 7, 79]),
    }


WRITE_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("kv_pool", torch.zeros(5, 2, 2, 2, 16, 64, dtype=torch.int32), TypeError, "found int32"),
    ("kv_pool", np.zeros((5, 2, 2, 2, 16, 65), np.float32)[..., :64], ValueError, "contiguous"),
    ("layer", 2, ValueError, "layer: expected 0 to 1, found 2"),
    ("key", torch.zeros(4, 2, 64, dtype=torch.bfloat16), TypeError,
     "key: expected dtype float32, that of kv_pool, found bfloat16"),
    ("key", torch.zeros(3, 2, 64), ValueError, r"key: .*\[4, 2, 64\], found \[3, 2, 64\]"),
    ("value", torch.zeros(4, 1, 64), ValueError, r"value: .*\[4, 2, 64\], found \[4, 1, 64\]"),
    ("value", transposed(torch.zeros(4, 2, 64)), ValueError, "value: .*contiguous last dimension"),
    ("slot_mapping", int32(5, 6, 7, 8), TypeError, "slot_mapping: expected dtype int64"),
    ("slot_mapping", torch.zeros(4, 1, dtype=torch.int64), ValueError, "slot_mapping: .*shape"),
    ("slot_mapping", torch.arange(8)[::2], ValueError, "slot_mapping: expected contiguous"),
    ("slot_mapping", torch.tensor([5, 6, 7, 80]), ValueError,
     r"slot_mapping\[3\]: expected a slot below 80, kv_pool's blocks x block size, found 80"),
    ("slot_mapping", torch.tensor([5, -1, 7, 8]), ValueError, r"slot_mapping\[1\]: .*found -1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), WRITE_ERRORS)
def test_write_kv_refuses(name: str, value: object, error: type[Exception], message: str) -> None:
    arguments = write_arguments()
    before = arguments["kv_pool"].clone()
    pool = arguments["kv_pool"]
    arguments[name] = value
    with pytest.raises(error, match=message):
        _native.write_kv(**arguments)
    assert torch.equal(pool, before)


def rotate_arguments() -> dict[str, Any]:
    case = make_case(Shape(), [(3, 17), (1, 4)])
    return {
        "qkv": torch.randn(4, 8 * 64),
        "num_heads": 4,
        "q_norm": torch.ones(64),
        "k_norm": torch.ones(64),
        "norm_eps": 1e-6,
        "cos_sin": torch.zeros(4, 64),
        "kv_pool": case.kv_pool.nan_to_num(),
        "layer": 1,
        "slot_mapping": torch.tensor([5, 6, 7, 79]),
    }


ROTATE_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("qkv", torch.zeros(4, 512, dtype=torch.bfloat16), TypeError, "qkv: expected dtype float32"),
    ("qkv", torch.zeros(4, 511), ValueError,
     r"qkv: expected shape \[num_tokens, \(num_heads .*\[any, 512\], found \[4, 511\]"),
    ("qkv", torch.zeros(512, 4).T, ValueError, "qkv: .*contiguous last dimension"),
    ("num_heads", 3, ValueError, "qkv: expected shape"),
    ("num_heads", 0, ValueError, "num_heads: expected at least 1, found 0"),
    ("num_heads", 2**40, ValueError, "num_heads"),
    ("q_norm", None, TypeError, "k_norm: expected None, as q_norm is, found a tensor"),
    ("k_norm", None, TypeError, "k_norm: expected a tensor, as q_norm is one, found None"),
    ("q_norm", torch.ones(63), ValueError, "q_norm: expected shape"),
    ("k_norm", torch.ones(64).bfloat16(), TypeError, "k_norm: expected dtype float32"),
    ("k_norm", torch.ones(128)[::2], ValueError, "k_norm: expected contiguous"),
    ("norm_eps", -1.0, ValueError, "norm_eps: expected a finite number of 0 or more"),
    ("norm_eps", float("nan"), ValueError, "norm_eps"),
    ("cos_sin", torch.zeros(3, 64), ValueError, r"cos_sin: .*\[4, 64\], found \[3, 64\]"),
    ("cos_sin", torch.zeros(4, 64).bfloat16(), TypeError, "cos_sin: expected dtype float32"),
    ("cos_sin", torch.zeros(64, 4).T, ValueError, "cos_sin: expected contiguous"),
    ("kv_pool", torch.zeros(5, 2, 2, 2, 16, 63), ValueError, "an even head_dim, found 63"),
    ("layer", 2, ValueError, "layer: expected 0 to 1, found 2"),
    ("slot_mapping", int32(5, 6, 7, 8), TypeError, "slot_mapping: expected dtype int64"),
    ("slot_mapping", torch.tensor([5, 6, 7]), ValueError, "slot_mapping: expected shape"),
    ("slot_mapping", torch.tensor([5, 6, 7, 80]), ValueError, r"slot_mapping\[3\]: .*found 80"),
    ("variant", "sse9", ValueError, "variant: expected one of"),
]  # fmt: skip


def test_rotating_works_as_it_is() -> None:
    _native.rotate_and_write(**rotate_arguments())


@pytest.mark.parametrize(("name", "value", "error", "message"), ROTATE_ERRORS)
def test_rotate_and_write_refuses(
    name: str, value: object, error: type[Exception], message: str
) -> None:
    arguments = rotate_arguments()
    written = [arguments["qkv"], arguments["kv_pool"]]
    before = [tensor.clone() for tensor in written]
    arguments[name] = value
    with pytest.raises(error, match=message):
        _native.rotate_and_write(**arguments)
    assert all(torch.equal(now, then) for now, then in zip(written, before, strict=True))


def test_a_read_only_pool_is_not_written() -> None:
    arguments = write_arguments()
    pool = np.zeros((5, 2, 2, 2, 16, 64), dtype=np.float32)
    pool.flags.writeable = False
    arguments["kv_pool"] = pool
    with pytest.raises(TypeError, match="expected a writable CPU tensor, found a read-only nd"):
        _native.write_kv(**arguments)


def test_numpy_arrays_work_too() -> None:
    arguments = write_arguments()
    for name in ("kv_pool", "key", "value", "slot_mapping"):
        arguments[name] = arguments[name].numpy()
    arguments["key"][:] = 1.0
    arguments["key"].flags.writeable = False
    _native.write_kv(**arguments)
    assert arguments["kv_pool"][0, 1, 0, :, 5:8].min() == 1.0
