"""Products with quantised weights on GPUs have the bits of those on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.cuda.quantised import products
from pdserve.engine.cuda.quantised.products import Weights, multiply
from pdserve.engine.plan.forms import FP8, INT4, INT8, WeightForm, coded_form
from pdserve.model_files.coding import Coding
from tests.codes import CODINGS, TWO_LEVELS, random_codes
from tests.matrix import matrix
from tests.unit.engine_cuda.quantised import (
    check_codes,
    check_experts,
    check_rows,
    check_weights,
    made,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
SIZES = [(3, 32, 256), (17, 70, 768), (1, 33, 512)]  # rows, outputs, inputs
FORMS = [INT8, INT4, FP8]
TELLING = CODINGS.index(Coding(6, 16, 32, TWO_LEVELS, True))


@pytest.mark.parametrize(
    ("coding", "sizes"),
    matrix(
        [(coding, sizes) for sizes in SIZES for coding in CODINGS], [(CODINGS[TELLING], SIZES[0])]
    ),
)
def test_codes_of_files(coding: Coding, sizes: tuple[int, int, int]) -> None:
    check_codes(coding, sizes, CPU)


@pytest.mark.parametrize(
    ("sizes", "form"),
    matrix(
        [(sizes, form) for sizes in ((2, 32, 96), (2, 35, 1088), (70, 64, 544)) for form in FORMS],
        3,
    ),
)
def test_weights_that_are_quantised_when_loaded(
    sizes: tuple[int, int, int], form: WeightForm
) -> None:
    check_weights(form, sizes, CPU)


@pytest.mark.parametrize(
    ("form", "most"),
    matrix([(INT4, 17), *((form, most) for most in (40, 130) for form in FORMS)], 1),
)
def test_a_row_s_bits_are_its_own(form: WeightForm, most: int) -> None:
    check_rows(form, most, CPU)


@pytest.mark.parametrize(
    ("form", "sizes", "tile"),
    matrix(
        [
            (INT4, (2, 32, 64), 16),
            *((form, sizes, 64) for form in FORMS for sizes in ((3, 40, 320), (40, 70, 320))),
        ],
        1,
    ),
)
def test_experts(form: WeightForm, sizes: tuple[int, int, int], tile: int) -> None:
    check_experts(form, sizes, tile, CPU)


# What would be wrong, and nearly right.
MUTANTS: dict[str, Callable[[Weights], Weights]] = {
    "scales of the next group": lambda own: own._replace(scales=own.scales.roll(1, 0)),
    "no minimums": lambda own: own._replace(kind=replace(own.kind, has_minimums=False)),
    "minimums of the next group": lambda own: own._replace(
        minimums=None if own.minimums is None else own.minimums.roll(1, 0)
    ),
    "another zero": lambda own: own._replace(kind=replace(own.kind, zero=own.kind.zero + 1)),
    "supers of scales for minimums": lambda own: own._replace(super_minimums=own.super_scales),
    "halves of bytes, swapped": lambda own: own._replace(codes=own.codes << 4 | own.codes >> 4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_products_of_mutants_are_others(name: str) -> None:
    codes, x = random_codes(Coding(4, 32, 0, TWO_LEVELS, True), 32, 256), rows_of(3, 256, 5)
    weights = made(codes, coded_form(codes.coding), CPU).weights
    assert not torch.equal(multiply(x, MUTANTS[name](weights)), multiply(x, weights))


@pytest.mark.long
def test_both_planes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = made(torch.randn(32, 96), INT8, CPU).weights
    x, integers = rows_of(3, 96, 5), products.integers_of
    right = multiply(x, weights)
    for change in (
        lambda planes: planes.flip(0),
        lambda planes: planes * torch.tensor([1, 0])[:, None, None],
    ):
        monkeypatch.setattr(
            products,
            "integers_of",
            lambda *of, change=change: integers(*of)._replace(
                planes=change(integers(*of).planes).to(torch.int8).contiguous()
            ),
        )
        assert not torch.equal(multiply(x, weights), right)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_says_so_and_others_do_not(bad: float) -> None:
    x = rows_of(3, 96, 5)
    x[1, 50] = bad
    found = multiply(x, made(torch.randn(32, 96), INT8, CPU).weights)
    assert found.isnan().all(dim=1).tolist() == [False, True, False]
    assert found[[0, 2]].isfinite().all()


@pytest.mark.long
def test_rows_of_float16_that_bfloat16_has_too_have_the_same_products() -> None:
    x = rows_of(3, 96, 5).clamp(-60_000, 60_000)
    x[x.abs() < 1e-3] = 0
    weights = made(torch.randn(32, 96), INT8, CPU).weights
    assert torch.equal(x.half().float(), x.float())
    assert torch.equal(
        multiply(x.half(), weights, torch.float32), multiply(x, weights, torch.float32)
    )


def test_rows_that_do_not_fit_are_refused() -> None:
    weights = made(torch.randn(32, 96), INT8, CPU).weights
    with pytest.raises(ValueError, match=r"rows of shape \[3, 95\] for 96 inputs"):
        multiply(rows_of(3, 95, 5), weights)
    with pytest.raises(TypeError, match=r"rows of torch.float32 .*: bfloat16 or float16"):
        multiply(torch.zeros(3, 96), weights)
