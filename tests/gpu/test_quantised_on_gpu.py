"""Products with quantised weights, compiled, have the bits of a CPU's. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from pdserve.engine.plan.forms import FP8, INT4, INT8, WeightForm
from pdserve.model_files.coding import Coding
from tests.codes import CODINGS
from tests.unit.engine_cuda.quantised import check_codes, check_experts, check_rows, check_weights

CUDA = torch.device("cuda")
FORMS = pytest.mark.parametrize("form", [INT8, INT4, FP8], ids=lambda form: form.name)
SIZES = [(1, 33, 512), (17, 70, 768), (200, 320, 4096)]  # rows, outputs, inputs


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_codes_of_files(coding: Coding, sizes: tuple[int, int, int]) -> None:
    check_codes(coding, sizes, CUDA)


@FORMS
@pytest.mark.parametrize("sizes", [(2, 35, 1088), *SIZES])
def test_weights_that_are_quantised_when_loaded(
    form: WeightForm, sizes: tuple[int, int, int]
) -> None:
    check_weights(form, sizes, CUDA)


@FORMS
def test_a_row_s_bits_are_its_own(form: WeightForm) -> None:
    for most in (17, 40, 300):
        check_rows(form, most, CUDA)


@FORMS
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_experts(form: WeightForm, tile: int) -> None:
    check_experts(form, (150, 200, 512), tile, CUDA)
