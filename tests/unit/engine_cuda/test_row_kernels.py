"""The Triton kernels between products and attention, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.cases import GPU_DTYPES, Shape, make_case
from tests.matrix import matrix

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")


@pytest.fixture
def checks(interpreted: None):
    from tests.unit.engine_cuda import checks

    return checks


@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (1, 100), (0, 16), (5, 1)])
def test_add_rms_norm(checks, shape: tuple[int, int], dtype: torch.dtype) -> None:
    checks.check_add_rms_norm(shape, dtype, CPU)


@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_norm_of_what_a_sublayer_made(checks, dtype: torch.dtype) -> None:
    checks.check_norm_of_what_a_sublayer_made(dtype, CPU)


@pytest.mark.parametrize("dtype", matrix(GPU_DTYPES, 1))
@pytest.mark.parametrize("shape", [(3, 64), (2, 1500), (0, 16), (5, 1)])
def test_silu_mul(checks, shape: tuple[int, int], dtype: torch.dtype) -> None:
    checks.check_silu_mul(shape, dtype, CPU)


@pytest.mark.parametrize("dtype", matrix(GPU_DTYPES, 1))
@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize(
    "sizes", matrix([((3, 2, 40, 24),), ((5, 1, 64, 70),), ((2, 2, 16, 5),)], 1)
)
def test_experts(
    checks, num_rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    checks.check_experts(num_rows, sizes, dtype, CPU)


@pytest.mark.parametrize("dtype", matrix(GPU_DTYPES, 1))
def test_experts_of_gpt_oss(checks, dtype: torch.dtype) -> None:
    checks.check_experts(9, (5, 3, 40, 24), dtype, CPU, is_gpt_oss=True)


@pytest.mark.parametrize("dtype", matrix(GPU_DTYPES, 1))
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2, 64, 16), (1, 3, 80, 5), (3, 1, 8, 1)])
def test_rotate_and_write(checks, sizes, has_norm: bool, dtype: torch.dtype) -> None:
    num_kv_heads, group_size, head_dim, block_size = sizes
    shape = Shape(num_kv_heads, group_size, head_dim, block_size, dtype=dtype)
    checks.check_rotate_and_write(shape, has_norm, CPU)


def test_what_cannot_be_is_refused(interpreted: None) -> None:
    from pdserve.engine.cuda.layers import rows

    case = make_case(Shape(), [(2, 3)])
    slots = case.batch.slot_mapping
    half = torch.zeros(2, 32)
    rotation = rows.Rotation(half, half, None, 1e-6)
    good = torch.zeros(2, 8 * 64)
    with pytest.raises(TypeError, match="residual"):
        rows.add_rms_norm(torch.zeros(2, 4).bfloat16(), torch.ones(2, 4), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="weight of shape"):
        rows.add_rms_norm(torch.zeros(2, 4), None, torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match="cannot be added"):
        rows.add_rms_norm(torch.zeros(2, 4), torch.zeros(1, 4), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="of one size"):
        rows.silu_mul(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="no heads of 64"):
        rows.rotate_and_write(torch.zeros(2, 100), rotation, slots, case.kv_pool, 0)
    with pytest.raises(TypeError, match="qkv"):
        rows.rotate_and_write(good.bfloat16(), rotation, slots, case.kv_pool, 0)
    with pytest.raises(ValueError, match="3 tokens"):
        rows.rotate_and_write(torch.zeros(3, 8 * 64), rotation, slots, case.kv_pool, 0)
    with pytest.raises(TypeError, match="int64"):
        rows.rotate_and_write(good, rotation, slots.int(), case.kv_pool, 0)
    with pytest.raises(ValueError, match="layer -1"):
        rows.rotate_and_write(good, rotation, slots, case.kv_pool, -1)
    short = rows.Rotation(half[:1], half, None, 1e-6)
    with pytest.raises(ValueError, match="half a head"):
        rows.rotate_and_write(good, short, slots, case.kv_pool, 0)
    normed = rows.Rotation(half, half, torch.ones(4, 64), 1e-6)
    with pytest.raises(ValueError, match="norm of shape"):
        rows.rotate_and_write(good, normed, slots, case.kv_pool, 0)
    with pytest.raises(ValueError, match="queries are"):
        rows.rotate_and_write(good, rotation, slots, case.kv_pool, 0, torch.zeros(2, 5, 64))
