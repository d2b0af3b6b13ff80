"""KV in codes on GPUs: written and read as `kv/coded_rows.py` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.decoder import CudaDecoder
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded
from tests.fakes.late_copies import PromptCopies
from tests.kernels.cases import CODES, Shape, alone, make_case
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_cuda import checks
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_model.harness import make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
REQUESTS = [(1, 40), (5, 12)]
SHAPES = [
    Shape(2, 2, 32),
    Shape(1, 3, 80, block_size=8, dtype=torch.bfloat16),
    Shape(2, 1, 64, cap=20.0, has_sinks=True),
    Shape(2, 2, 32, dtype=torch.float16),
]


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("shape", matrix(SHAPES, 1), ids=str)
def test_attention_reads_codes(shape: Shape, codes: torch.dtype) -> None:
    case = make_case(replace(shape, codes=codes), REQUESTS)
    checks.check_attention(TritonAttention(), case, None)
    checks.check_attention(TritonAttention(), case, 7, layer=1)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("shape", matrix(SHAPES, 1), ids=str)
def test_rows_are_written_as_codes(shape: Shape, codes: torch.dtype) -> None:
    checks.check_coded_writes(replace(shape, codes=codes), CPU)


def test_a_row_s_bits_are_its_own_and_not_its_chunk_s() -> None:
    case = make_case(Shape(1, 2, 32, codes=torch.int8), [(9, 30), (6, 3)])
    together = checks.attend(TritonAttention(), case)
    for first, last in ((0, 4), (4, 9)):
        found = checks.attend(TritonAttention(), alone(case, 0, first, last))
        assert torch.equal(found, together[first:last])


def test_latent_rows_are_no_codes() -> None:
    case = make_case(Shape(1, 2, 32, value_dim=16), REQUESTS)
    pool = torch.zeros(*case.kv_pool.shape[:-1], 36, dtype=torch.int8)
    with pytest.raises(TypeError, match="latent attention are not read as codes"):
        checks.attend(TritonAttention(), replace(case, kv_pool=pool))


@pytest.mark.long  # interpreted; kernels are looked at by default
@pytest.mark.parametrize("kv_dtype", [KvDtype.INT8, KvDtype.FP8])
def test_a_decoder_says_what_torch_says_of_the_same_codes(
    kv_dtype: KvDtype, tmp_path: Path
) -> None:
    """A prompt in chunks, and decodes that replay graphs."""
    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=64, **sizes)
    config = load_model_config(resolve_checkpoint(str(path)))
    weights, recorder = random_weights(config, torch.float32, CPU), Recorded()
    buckets = (1, 4)
    cuda = CudaDecoder(
        config, weights, TritonAttention(), Staging(PromptCopies()), recorder, buckets
    )
    decoders: list[Decoder] = [TorchDecoder(config, weights, ReferenceAttention()), cuda]
    said = []
    for decoder in decoders:
        requests = [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in (1, 4, 11)]
        make_node(decoder, kv_dtype=kv_dtype).generate(requests, num_tokens=4, chunk=7)
        said.append([request.output_token_ids for request in requests])
    assert said[0] == said[1]
    assert recorder.recordings[1].num_replays > 0
