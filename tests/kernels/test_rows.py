"""What is done to rows: norms, the lookup of embeddings, and caps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from tests.kernels.cases import DTYPES, EACH_VARIANT
from tests.matrix import examples

# Every path: whole steps of every instruction set, single vectors, and elements that are left over.
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([128, 576, 768, 1000, 4097]))


def rms_norm(x: Tensor, weight: Tensor, dtype: torch.dtype, variant: str = "") -> Tensor:
    out = torch.full(x.shape, float("nan"), dtype=dtype)
    _native.rms_norm(x, weight, 1e-6, out, variant)
    return out


def exact_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float64."""
    mean_square = x.double().square().mean(dim=-1, keepdim=True)
    return x.double() * torch.rsqrt(mean_square + 1e-6) * weight.double()


def random_rows(num_rows: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(num_rows, 1, generator=generator) * 30 + 0.01
    return torch.randn(num_rows, size, generator=generator) * scales, torch.rand(
        size, generator=generator
    ) + 0.5


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(30))
@given(size=SIZES, num_rows=st.integers(0, 40), seed=st.integers(0, 9))
def test_norm_is_exact_but_for_its_roundings(
    variant: str, dtype: torch.dtype, size: int, num_rows: int, seed: int
) -> None:
    x, weight = random_rows(num_rows, size, seed)
    found = rms_norm(x, weight, dtype, variant)
    if dtype is torch.float32:
        _native.rms_norm(x, weight, 1e-6, added := torch.ones_like(x), variant, adds=True)
        torch.testing.assert_close(added, found + 1, rtol=1e-6, atol=1e-6)
    # Half a unit in the last place of bfloat16, and some roundings in float32 before it.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-6}[dtype]
    torch.testing.assert_close(
        found.double(), exact_rms_norm(x, weight), rtol=tolerance, atol=1e-30
    )


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_stands_beside_it(variant: str, dtype: torch.dtype) -> None:
    x, weight = random_rows(300, 777, 0)
    together = rms_norm(x, weight, dtype, variant)
    for row in range(0, 300, 37):
        assert torch.equal(rms_norm(x[row : row + 1], weight, dtype, variant)[0], together[row])
    damaged = x.clone()
    damaged[::2] = float("nan")
    assert torch.equal(rms_norm(damaged, weight, dtype, variant)[1::2], together[1::2])
    assert rms_norm(damaged, weight, dtype, variant)[::2].isnan().all()


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(20))
@given(size=SIZES, seed=st.integers(0, 9))
def test_lookup_is_that_of_torch(variant: str, dtype: torch.dtype, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(50, size, generator=generator).to(dtype)
    ids = torch.randint(50, (33,), generator=generator)
    out = torch.full((33, size), float("nan"))
    _native.look_up_rows(table, ids, out, variant)
    assert torch.equal(out, table[ids].float())
    _native.look_up_rows(table, ids, out, variant, scale=25.25)
    assert torch.equal(out, table[ids].float() * 25.25)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@settings(max_examples=examples(20))
@given(size=SIZES, cap=st.sampled_from([1.0, 30.0]), seed=st.integers(0, 9))
def test_numbers_are_kept_within_a_cap(variant: str, size: int, cap: float, seed: int) -> None:
    x, _ = random_rows(5, size, seed)
    x[0] *= 1e-6  # where tanh loses no digits
    x[1], x[2, 0], x[3, -1], x[4, 0] = 0.0, float("nan"), float("inf"), -float("inf")
    expected = cap * torch.tanh(x.double() / cap)
    wide = torch.full((5, size + 3), 7.0)
    wide[:, 1 : size + 1] = x
    _native.cap_rows(wide[:, 1 : size + 1], cap, variant)
    found = wide[:, 1 : size + 1].double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-30, equal_nan=True)
    assert bool((wide[:, 0] == 7).all() and (wide[:, size + 1 :] == 7).all())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(3, 8).bfloat16()}, TypeError, "x: expected dtype float32"),
        ({"x": torch.zeros(8)}, ValueError, "x: expected shape"),
        ({"x": torch.zeros(3, 0)}, ValueError, "x: expected rows of at least one element"),
        ({"weight": torch.zeros(7)}, ValueError, r"weight: expected shape \[size\] = \[8\]"),
        ({"out": torch.zeros(2, 8)}, ValueError, "out: expected shape"),
        ({"out": torch.zeros(3, 8).half()}, TypeError, "out: expected dtype"),
        ({"variant": "mmx"}, ValueError, "variant: expected one of"),
    ],
)
def test_norm_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "x": torch.zeros(3, 8),
        "weight": torch.ones(8),
        "eps": 1e-6,
        "out": torch.zeros(3, 8),
    }
    with pytest.raises(error, match=message):
        _native.rms_norm(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": torch.tensor([0, 5])}, ValueError, r"ids\[1\]: expected an id below 5, found 5"),
        ({"ids": torch.tensor([-1, 4])}, ValueError, r"ids\[0\]: .*found -1"),
        ({"ids": torch.tensor([0, 1]).int()}, TypeError, "ids: expected dtype int64, found int32"),
        ({"table": torch.zeros(5, 4).half()}, TypeError, "table: expected dtype"),
        ({"out": torch.zeros(2, 3)}, ValueError, r"out: expected shape .*\[2, 4\]"),
    ],
)
def test_lookup_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "table": torch.zeros(5, 4),
        "ids": torch.tensor([0, 1]),
        "out": torch.zeros(2, 4),
    }
    with pytest.raises(error, match=message):
        _native.look_up_rows(**(arguments | change))
