"""CudaDecoder with real graphs and pinned copies. Skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.capture.graphs import Recorder
from pdserve.engine.cuda.capture.recorder import CudaRecorder
from pdserve.engine.cuda.copies.staging import CudaCopies, Staging
from pdserve.engine.cuda.decoder import CudaDecoder
from pdserve.engine.cuda.load import cuda_decoder
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.weights.load import load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded
from tests.plain_batch import build_batch
from tests.plans import activations, plan_in
from tests.requests import make_request
from tests.unit.engine_cuda.adapted import check_bits, check_mix
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_cuda.test_staging import make_batch, tensors
from tests.unit.engine_model.harness import Node, make_prompt

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
CUDA = torch.device("cuda", 0)
BUCKETS = (1, 2, 4, 8)
PIECES = (8, 16, 32)  # numbers of rows


def config_of(tmp_path: Path, family: str) -> ModelConfig:
    window = {"sliding_window": 30} if family == "mistral" else {}
    path = make_checkpoint(tmp_path, family, max_position_embeddings=512, **window)
    return load_model_config(resolve_checkpoint(str(path)))


def make_decoder(config: ModelConfig, dtype: torch.dtype, recorder: Recorder | None) -> CudaDecoder:
    weights = random_weights(config, dtype, CUDA)
    staging = Staging(CudaCopies(CUDA))
    attention = TritonAttention()
    return CudaDecoder(config, weights, attention, staging, recorder, BUCKETS, piece_sizes=PIECES)


def make_requests(lengths: tuple[int, ...] = (1, 17, 90)) -> list[Request]:
    return [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in lengths]


def tokens(node: Node, chunk: int = 13) -> list[list[int]]:
    requests = make_requests()
    node.generate(requests, num_tokens=12, chunk=chunk)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_the_cpu_s_tokens(tmp_path: Path, family: str) -> None:
    """Chunks of prompts beside decode rows by pieces, then decode steps by graphs; greedy,
    float32.
    """
    config = config_of(tmp_path, family)
    oracle = TorchDecoder(config, random_weights(config, torch.float32, CPU), ReferenceAttention())
    found = make_decoder(config, torch.float32, CudaRecorder(CUDA))
    assert tokens(make_node(found)) == tokens(make_node(oracle))


def test_a_mix_of_adapters_says_what_torch_says(tmp_path: Path) -> None:
    check_mix(tmp_path, CUDA, CudaCopies(CUDA))


def test_bits_with_adapters_do_not_depend_on_the_batch() -> None:
    check_bits(CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_requests", [1, 3, 8])
def test_a_replay_has_the_bits_of_its_launches(
    tmp_path: Path, dtype: torch.dtype, num_requests: int
) -> None:
    """Step for step, logits and pool: one decoder replays graphs, the other launches the same."""
    config = config_of(tmp_path, "qwen3")
    nodes = [
        make_node(make_decoder(config, dtype, recorder))
        for recorder in (CudaRecorder(CUDA), Recorded())
    ]
    seen: list[list[torch.Tensor]] = []
    for node in nodes:
        requests = make_requests(tuple(range(5, 5 + num_requests)))
        node.generate(requests, num_tokens=1)
        logits = [decode_step(node, requests) for _ in range(10)]
        seen.append([*logits, node.kv_cache.pool.nan_to_num(nan=7.0)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def decode_step(node: Node, requests: list[Request]) -> torch.Tensor:
    """The logits of one step; the requests are advanced by token 5."""
    rows = [Scheduled(request, 1) for request in requests]
    for request in requests:
        while len(request.block_table) < node.kv_cache.layout.blocks_for(request.num_tokens):
            request.block_table.append(node.free.pop())
    batch = build_batch(rows, node.kv_cache.layout.block_size, CPU)
    logits = node.model.logits(batch, node.kv_cache.pool)
    assert logits is not None
    copy = logits.clone()
    for request in requests:
        request.num_computed_tokens += 1
        request.output_token_ids.append(5)
    return copy


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("qwen3_moe", torch.float32)],
)
def test_pieces_compute_what_their_launches_do(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Nearly: of more rows, cuBLAS may add up a row's products in another order."""
    config = config_of(tmp_path, family)
    found = []
    for recorder in (CudaRecorder(CUDA), None):
        node = make_node(make_decoder(config, dtype, recorder))
        requests = make_requests((1, 17))
        for request in requests:
            request.block_table = [node.free.pop() for _ in range(3)]
        rows = [Scheduled(request, request.num_uncomputed_tokens) for request in requests]
        logits = node.model.logits(build_batch(rows, 8, CPU), node.kv_cache.pool)
        assert logits is not None
        found.append((logits.clone(), node.kv_cache.pool.nan_to_num(nan=7.0)))
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    for pieces, launched in zip(*found, strict=True):
        torch.testing.assert_close(pieces, launched, atol=tolerance, rtol=tolerance)


def test_a_capture_that_fails_leaves_the_thread_on_its_stream() -> None:
    """As where a library waits in one: CUDA forbids it, and then nothing of it can be used."""
    recorder, before = CudaRecorder(CUDA), torch.cuda.current_stream(CUDA)
    with pytest.raises(RuntimeError):
        recorder.record(lambda: torch.cuda.current_stream(CUDA).synchronize())
    assert torch.cuda.current_stream(CUDA) == before


def test_filling_rows_leave_the_pool_alone(tmp_path: Path) -> None:
    """What the pool held before is NaN: a filling row's write, or read, would show."""
    config = config_of(tmp_path, "llama")
    node = make_node(make_decoder(config, torch.float32, CudaRecorder(CUDA)))
    requests = make_requests()
    node.generate(requests, num_tokens=6)
    used = {block for request in requests for block in request.block_table}
    unused = [block for block in range(node.kv_cache.num_blocks) if block not in used]
    assert node.kv_cache.pool[unused].isnan().all()
    for request in requests:
        blocks = node.kv_cache.pool[request.block_table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        assert not blocks[:, :, :, : request.num_computed_tokens].isnan().any()
        assert blocks[:, :, :, request.num_computed_tokens :].isnan().all()


def test_uploads_are_not_overtaken_by_the_next_ones() -> None:
    """The GPU is kept busy, so that the copies come late; the host goes on at once."""
    staging = Staging(CudaCopies(CUDA))
    batches = [make_batch(64, 64, 200 + seed, seed) for seed in range(20)]
    expected = [[tensor.clone() for tensor in tensors(batch)] for batch in batches]
    busy = torch.randn(4096, 4096, device=CUDA)
    uploaded = []
    for batch in batches:
        busy = busy @ busy * 1e-3
        uploaded.append(staging.upload(batch))
        for tensor in tensors(batch):
            tensor.fill_(-1)
    torch.cuda.synchronize(CUDA)
    for found, wanted in zip(uploaded, expected, strict=True):
        for a, b in zip(tensors(found), wanted, strict=True):
            assert torch.equal(a.cpu(), b)


def test_layers_are_reported_while_the_step_runs(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama")
    node = make_node(make_decoder(config, torch.float32, CudaRecorder(CUDA)))
    request = make_request(make_prompt(40))
    request.block_table = [node.free.pop() for _ in range(5)]
    for num_tokens in (40, 20):  # launched, and by pieces
        seen: list[int] = []
        batch = build_batch([Scheduled(request, num_tokens)], 8, CPU)
        node.model.logits(batch, node.kv_cache.pool, LayerProgress([1, 2], seen.append))
        assert seen == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_on_a_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    """As the file has them, and converted."""
    checkpoint = resolve_checkpoint(str(make_checkpoint(tmp_path, "qwen3_moe")))
    config = load_model_config(checkpoint)
    plan = plan_in(config, dtype)
    there, here = (
        load_torch_weights(checkpoint, plan, activations(dtype), on) for on in (CUDA, CPU)
    )
    for name, slot in there.slots.items():
        assert torch.equal(slot.destination.cpu(), here.slots[name].destination), name


def test_a_node_gets_it_from_its_weights(tmp_path: Path) -> None:
    """With the best attention that is installed here, and all buckets."""
    config = config_of(tmp_path, "qwen3")
    model = cuda_decoder(config, random_weights(config, torch.bfloat16, CUDA))
    assert isinstance(model, CudaDecoder)
    assert all(len(output) == 12 for output in tokens(make_node(model)))
