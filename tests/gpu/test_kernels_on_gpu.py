"""The Triton kernels, compiled, against the same references as interpreted. Needs a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from pdserve.engine.cuda.attention.catalog import KINDS, AttentionNeeds
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from tests.kernels.cases import CODES, DTYPES, Shape, alone, make_case, requests, shapes
from tests.matrix import examples
from tests.unit.engine_cuda import checks, recurrent_checks

CUDA = torch.device("cuda")
WINDOWS = st.one_of(st.none(), st.integers(1, 200))
LIBRARIES = [kind for kind in KINDS if kind.name not in ("triton", "reference")]


@settings(max_examples=examples(60))
@given(
    shape=shapes(),
    requests=requests(),
    window=WINDOWS,
    seed=st.integers(0, 9),
    is_strided=st.booleans(),
)
def test_any_batch_matches_the_reference(shape, requests, window, seed, is_strided) -> None:
    case = checks.on(make_case(shape, requests, seed, is_strided), CUDA)
    checks.check_attention(TritonAttention(), case, window, shape.num_layers - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_contexts(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(Shape(8, 4, head_dim, dtype=dtype), [(1, 30_000), (300, 9_000), (1, 5)])
    for window in (None, 4096):
        checks.check_attention(TritonAttention(), checks.on(case, CUDA), window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_s_bits_are_its_own(dtype: torch.dtype, window: int | None) -> None:
    """Alone, beside others, and however a chunk of several rows is cut."""
    case = make_case(Shape(8, 4, 128, dtype=dtype), [(200, 900), (1, 3000), (90, 0)])
    together = checks.attend(TritonAttention(), checks.on(case, CUDA), window)
    for request, cuts in ((0, (0, 13, 77, 200)), (1, (0, 1)), (2, (0, 90))):
        start = int(case.batch.query_start[request])
        for first, last in pairwise(cuts):
            part = checks.on(alone(case, request, first, last), CUDA)
            found = checks.attend(TritonAttention(), part, window)
            assert torch.equal(found, together[start + first : start + last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_latent_rows(num_heads: int, dtype: torch.dtype) -> None:
    """DeepSeek's, and others that fill no power of two."""
    for row_dim, value_dim in ((576, 512), (90, 70)):
        shape = Shape(1, num_heads, row_dim, dtype=dtype, value_dim=value_dim)
        case = make_case(shape, [(1, 3000), (70, 60), (5, 0)])
        checks.check_attention(TritonAttention(), checks.on(case, CUDA), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 128])
def test_sinks(window: int | None, dtype: torch.dtype) -> None:
    shape = Shape(8, 8, 64, dtype=dtype, has_sinks=True)
    case = make_case(shape, [(1, 3000), (70, 60), (5, 0)])
    checks.check_attention(TritonAttention(), checks.on(case, CUDA), window)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 2, 64, 16), (1, 3, 80, 5), (8, 4, 128, 16)])
def test_kv_in_codes(sizes, dtype: torch.dtype, codes: torch.dtype) -> None:
    shape = Shape(*sizes, dtype=dtype, codes=codes)
    checks.check_coded_writes(shape, CUDA)
    case = checks.on(make_case(shape, [(1, 3000), (70, 60), (5, 0)]), CUDA)
    for window in (None, 50):
        checks.check_attention(TritonAttention(), case, window)


@pytest.mark.parametrize("kind", LIBRARIES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_libraries_match_the_reference(kind, head_dim: int, window: int | None) -> None:
    obstacle = kind.obstacle(AttentionNeeds(torch.bfloat16, head_dim))
    if obstacle is not None:
        pytest.skip(obstacle)
    case = make_case(
        Shape(2, 4, head_dim, num_layers=3, dtype=torch.bfloat16), [(1, 300), (70, 60), (5, 0)]
    )
    checks.check_attention(kind.open(CUDA), checks.on(case, CUDA), window, layer=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (1, 100), (70, 4096), (2, 8192)])
def test_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    checks.check_add_rms_norm(shape, dtype, CUDA)
    checks.check_silu_mul(shape, dtype, CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 40, 3000])
@pytest.mark.parametrize("sizes", [(3, 2, 40, 24), (8, 2, 512, 1000), (128, 8, 256, 96)])
def test_experts(num_rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    checks.check_experts(num_rows, sizes, dtype, CUDA)
    checks.check_experts(num_rows, sizes, dtype, CUDA, is_gpt_oss=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2, 64, 16), (1, 3, 80, 5), (8, 4, 128, 16)])
def test_cache_writes(sizes, has_norm: bool, dtype: torch.dtype) -> None:
    num_kv_heads, group_size, head_dim, block_size = sizes
    shape = Shape(num_kv_heads, group_size, head_dim, block_size, dtype=dtype)
    checks.check_rotate_and_write(shape, has_norm, CUDA)


def test_states() -> None:
    recurrent_checks.check_cpus_and_gpus_go_on_with_what_the_other_has_left(CUDA)
    recurrent_checks.check_bits_depend_on_no_batch_and_no_chunk(CUDA)
    recurrent_checks.check_a_state_is_kept_behind_any_row(CUDA)
