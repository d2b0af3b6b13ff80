"""Random products with packed matrices, their float64 results, and what rounding may change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pdserve.engine.native.linear import (
    LinearResult,
    PackedLinear,
    linear,
    pack,
)
from pdserve.engine.plan.forms import BFLOAT16, FLOAT32, FP8, INT8, WeightForm
from tests.unpack import unpack

WEIGHT_FORMS = [FLOAT32, BFLOAT16, INT8, FP8]
DTYPES = [torch.float32, torch.bfloat16]
GATED = {  # gate and up -> two factors
    LinearResult.GATED_SILU: lambda gate, up: (functional.silu(gate), up),
    LinearResult.GATED_GELU: lambda gate, up: (functional.gelu(gate, approximate="tanh"), up),
    LinearResult.GATED_CLAMPED: lambda gate, up: (
        gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid(),
        up.clamp(-7, 7) + 1,
    ),
}
FLOAT_RESULTS = (LinearResult.STORE_FLOAT, LinearResult.ADD)


@dataclass(frozen=True)
class Product:
    """Everything that a product depends on but its x."""

    form: WeightForm = BFLOAT16
    dtype: torch.dtype = torch.bfloat16  # of x
    num_out: int = 64
    num_in: int = 96
    result: LinearResult = LinearResult.STORE
    has_bias: bool = False

    @property
    def is_gated(self) -> bool:
        return self.result in GATED

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.result in FLOAT_RESULTS else self.dtype


@dataclass(frozen=True, eq=False)
class Case:
    """A product with an x, and with what stands in `out` before."""

    product: Product
    packed: PackedLinear
    bias: Tensor | None  # [num_out] float32
    x: Tensor  # [num_rows, num_in]
    before: Tensor  # [num_rows, num_columns]

    def run(self, variant: str = "", x: Tensor | None = None, rows: slice | None = None) -> Tensor:
        """The result, of some rows only, or of another x."""
        rows = slice(None) if rows is None else rows
        out = self.before[rows].clone()
        x = self.x if x is None else x
        return linear(x[rows], self.packed, out, self.product.result, variant)


def products(result: LinearResult | None = None) -> st.SearchStrategy[Product]:
    """All kinds, and sizes that end panels, pairs and vectors early."""
    results = st.sampled_from(list(LinearResult)) if result is None else st.just(result)
    return st.builds(
        Product,
        form=st.sampled_from(WEIGHT_FORMS),
        dtype=st.sampled_from(DTYPES),
        num_out=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 300])).map(lambda n: 2 * n),
        num_in=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 301])),
        result=results,
        has_bias=st.booleans(),
    ) | st.builds(Product, num_out=st.integers(1, 100), result=st.just(LinearResult.STORE_FLOAT))


def row_counts() -> st.SearchStrategy[int]:
    """Around the sizes of the kernels' tiles, and many."""
    return st.one_of(st.integers(1, 40), st.sampled_from([97, 191, 193, 250]))


def make_case(product: Product, num_rows: int, seed: int = 0, is_strided: bool = False) -> Case:
    torch.manual_seed(seed)
    weight = torch.randn(product.num_out, product.num_in)
    bias = torch.randn(product.num_out) if product.has_bias else None
    packed = pack(weight, bias, form=product.form, is_gated=product.is_gated)
    x = random_rows(num_rows, product.num_in, product.dtype, is_strided)
    before = random_rows(num_rows, packed.num_columns, product.out_dtype, is_strided)
    return Case(product, packed, bias, x, before)


def random_rows(num_rows: int, num_columns: int, dtype: torch.dtype, is_strided: bool) -> Tensor:
    """[num_rows, num_columns]; if strided, a slice of longer rows, at an odd address."""
    if not is_strided:
        return torch.randn(num_rows, num_columns).to(dtype)
    return torch.randn(num_rows, num_columns + 4).to(dtype)[:, 1 : num_columns + 1]


def expect_reference(found: Tensor, case: Case) -> None:
    """`found` is within a few roundings of the same product in float64."""
    expected, tolerance = reference(case)
    if case.product.out_dtype is torch.bfloat16:
        tolerance = tolerance + expected.abs() * 2**-8
    error = (found.double() - expected).abs()
    assert bool((error <= tolerance).all()), f"{error.max()} beyond {tolerance.min()}"


def _half_steps(x: Tensor) -> Tensor:
    """How far integers of 8 bits, of which 16 inputs share a scale, are from x at most."""
    width = x.shape[1]
    largest = functional.pad(x, (0, -width % 16)).abs().view(len(x), -1, 16).amax(2)
    return (largest / 253).repeat_interleave(16, dim=1)[:, :width]


@lru_cache(maxsize=1)  # one variant after the other is compared with it
def reference(case: Case) -> tuple[Tensor, Tensor]:
    """[num_rows, num_columns] each: the result in float64, and what float32 sums may differ."""
    weight, x = unpack(case.packed).double(), case.x.double()
    y = x @ weight.T
    tolerance = (x.abs() @ weight.abs().T) * 2**-21
    if case.product.form is INT8 and case.product.dtype is torch.bfloat16:
        tolerance = tolerance + _half_steps(x) @ weight.abs().T
    if case.bias is not None:
        y, tolerance = y + case.bias, tolerance + case.bias.abs() * 2**-21
    if case.product.result is LinearResult.ADD:
        return y + case.before, tolerance + (y + case.before).abs() * 2**-22
    if not case.product.is_gated:
        return y, tolerance
    gate, up = y.chunk(2, dim=1)
    gate_tolerance, up_tolerance = tolerance.chunk(2, dim=1)
    activated, up = GATED[case.product.result](gate, up)
    expected = activated * up
    # The slopes of both are nowhere above 1.2.
    return expected, (
        1.2 * gate_tolerance * (up.abs() + up_tolerance)
        + activated.abs() * up_tolerance
        + expected.abs() * 2**-19
    )
