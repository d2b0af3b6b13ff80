"""CudaDecoder computes what TorchDecoder does: kernels interpreted, graphs replayed on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.long_requests import LONG_ROPE
from tests.matrix import matrix

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.request import Scheduled
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.pooling import Pooling
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded
from tests.fakes.late_copies import PromptCopies
from tests.requests import make_request, work_of
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_model.harness import Node, make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
BUCKETS = (1, 4)
PIECES = (7,)  # numbers of rows
NUM_PIECES = len(PIECES) * (1 + 2)  # before the layers, and for each of them


OTHERS = ["phi3", "qwen2_moe", "granite", "olmo2", "olmo3", "smollm3", "glm4", "cohere2"]
OTHERS += ["deepseek_v2", "deepseek_v3", "gpt_oss"]


LONG = "longrope"  # with other rotary factors for long requests
FAMILY_OF = {LONG: "phi3"}


@dataclass
class Both:
    """The same weights in both decoders."""

    torch: Node
    cuda: Node
    recorder: Recorded


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path, interpreted: None) -> Both:
    """Of the family that the test names as its parameter, or `LONG`."""
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.decoder import CudaDecoder

    # Small, since every program of every kernel is interpreted.
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    if request.param.startswith("deepseek"):
        sizes |= {"num_key_value_heads": 2, "first_k_dense_replace": 1}
    has_window = request.param in ("mistral", "gemma2", "gemma3", "gpt_oss")
    window: dict[str, object] = {"sliding_window": 6} if has_window else {}
    if has_window and request.param != "mistral":
        window["layer_types"] = ["sliding_attention", "full_attention"]
    fields: dict[str, object] = {"max_position_embeddings": 64, **sizes, **window}
    if request.param == LONG:
        fields |= LONG_ROPE | {"num_attention_heads": 4}
    path = make_checkpoint(tmp_path, FAMILY_OF.get(request.param, request.param), **fields)
    config = load_model_config(resolve_checkpoint(str(path)))
    weights = random_weights(config, torch.float32, CPU)
    recorder = Recorded()
    cuda = CudaDecoder(
        config,
        weights,
        TritonAttention(),
        Staging(PromptCopies()),
        recorder,
        BUCKETS,
        piece_sizes=PIECES,
    )
    oracle = TorchDecoder(config, weights, ReferenceAttention())
    return Both(make_node(oracle), make_node(cuda), recorder)


def requests():
    return [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in (1, 4, 11)]


@pytest.mark.parametrize(
    "both",
    matrix(["qwen3", "gemma3", "gemma2", "llama", "mistral", "qwen3_moe", *OTHERS], 1),
    indirect=True,
)
def test_tokens_of_chunked_prompts_and_decode_steps(both: Both) -> None:
    """A step of 12 rows is launched, one of 6 goes through pieces, and then come decodes."""
    outputs = []
    for node in (both.torch, both.cuda):
        batch = requests()
        node.generate(batch, num_tokens=4, chunk=7)
        outputs.append([request.output_token_ids for request in batch])
    assert outputs[0] == outputs[1]
    # Steps that only decode went through graphs; three rows were filled up to four.
    assert both.recorder.recordings[1].num_replays > 0
    assert [of.num_replays for of in both.recorder.recordings[2:]] == [1] * NUM_PIECES


@pytest.mark.long  # nodes without a GPU do by default
@pytest.mark.parametrize("both", [LONG], indirect=True)
def test_long_requests_beside_others(both: Both) -> None:
    """In steps that are launched, in pieces, and in graphs."""
    outputs = []
    for node in (both.torch, both.cuda):
        batch = [*requests(), make_request(make_prompt(11, seed=11), is_long=True)]
        node.generate(batch, num_tokens=6, chunk=7)
        outputs.append([request.output_token_ids for request in batch])
    assert outputs[0] == outputs[1]
    assert outputs[0][-1] != outputs[0][-2], "of the same prompt"


@pytest.mark.long
@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_states_of_prompts_among_ordinary_ones(both: Both) -> None:
    found = []
    for node in (both.torch, both.cuda):
        embedders = [make_request(make_prompt(9, p), max_tokens=0, pooling=p) for p in Pooling]
        rows = [*embedders, make_request(make_prompt(4), max_tokens=2)]
        for num_tokens in (4, 5):
            node.step([Scheduled(r, min(num_tokens, r.num_uncomputed_tokens)) for r in rows])
        found.append([np.frombuffer(work_of(request).embedding, "<f4") for request in embedders])
        assert len(rows[-1].output_token_ids) == 2
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_scores_of_prompts(both: Both) -> None:
    """In parts of a few rows, each of which is a step of its own; one is too large for pieces."""
    found = []
    for node in (both.torch, both.cuda):
        logits_bytes = 5 * 4 * node.model.config.vocab_size
        node.runner = ModelRunner(node.model, node.kv_cache, scored_logits_bytes=logits_bytes)
        scored = make_request(make_prompt(9), prompt_logprobs=1)
        plain = make_request(make_prompt(14))
        node.generate([plain, scored], num_tokens=2)
        logprobs = [of.chosen for of in work_of(scored).logprobs]
        found.append((logprobs, plain.output_token_ids, scored.output_token_ids))
    assert found[0][1:] == found[1][1:]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-4)
    assert len(found[0][0]) == 8
    assert any(of.num_replays for of in both.recorder.recordings[len(BUCKETS) :])


@pytest.mark.long
@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_where_only_pieces_cannot_be_captured_decodes_are_replayed(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    both.recorder.refusal, both.recorder.refuses_each = "out of memory", True
    outputs = []
    for node in (both.torch, both.cuda):
        batch = requests()
        node.generate(batch, num_tokens=3, chunk=7)
        outputs.append([request.output_token_ids for request in batch])
    assert outputs[0] == outputs[1]
    assert caplog.text.count("no CUDA graphs of steps with prompts") == 1
    assert both.recorder.recordings[1].num_replays > 0


@pytest.mark.long
@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_filling_rows_leave_the_pool_alone(both: Both) -> None:
    """What the pool held before is NaN: a filling row's write, or read, would show."""
    node = both.cuda
    batch = requests()
    node.generate(batch, num_tokens=3)
    used = sorted(block for request in batch for block in request.block_table)
    unused = [block for block in range(node.kv_cache.num_blocks) if block not in used]
    assert node.kv_cache.pool[unused].isnan().all()
    for request in batch:
        count = request.num_computed_tokens
        blocks = node.kv_cache.pool[request.block_table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        assert not blocks[:, :, :, :count].isnan().any()
        assert blocks[:, :, :, count:].isnan().all()


@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_layers_are_reported_and_then_no_whole_graph_is_used(both: Both) -> None:
    from pdserve.engine.layer_progress import LayerProgress

    node = both.cuda
    request = make_request(make_prompt(6))
    node.generate([request], num_tokens=1)
    replays = [r.num_replays for r in both.recorder.recordings[: len(BUCKETS)]]
    request.block_table.append(node.free.pop())
    seen: list[int] = []
    node.runner.execute([Scheduled(request, 1)], LayerProgress([1, 2], seen.append))
    assert seen == [1, 2]
    assert [r.num_replays for r in both.recorder.recordings[: len(BUCKETS)]] == replays


@pytest.mark.long
@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_another_pool_gets_graphs_of_its_own(both: Both) -> None:
    request = make_request(make_prompt(6))
    both.cuda.generate([request], num_tokens=2)
    assert len(both.recorder.recordings) == len(BUCKETS) + NUM_PIECES
    other = make_node(both.cuda.model)
    again = make_request(make_prompt(6))
    other.generate([again], num_tokens=2)
    assert len(both.recorder.recordings) == 2 * (len(BUCKETS) + NUM_PIECES)
    assert again.output_token_ids == request.output_token_ids


@pytest.mark.long  # test_steps_ahead.py has it by default
@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_where_graphs_cannot_be_captured_steps_are_launched(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    both.recorder.refusal = "operation not permitted when stream is capturing"
    outputs = []
    for node in (both.torch, both.cuda):
        batch = requests()
        node.generate(batch, num_tokens=3, chunk=7)
        outputs.append([request.output_token_ids for request in batch])
    assert outputs[0] == outputs[1]
    assert caplog.text.count("no CUDA graphs") == 1


def test_answers_are_sampled_as_many_at_a_time_as_a_step_may_have_requests(
    tmp_path: Path, interpreted: None
) -> None:
    """So much memory does `step_bytes` count."""
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.decoder import CudaDecoder

    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=64, num_hidden_layers=1)
    config = load_model_config(resolve_checkpoint(str(path)))
    weights = random_weights(config, torch.float32, CPU)
    copies = PromptCopies()
    decoder = CudaDecoder(
        config, weights, TritonAttention(), Staging(copies), None, BUCKETS, most_draws=2
    )
    node = make_node(decoder)
    request = make_request(make_prompt(4), max_tokens=2)
    request.siblings = [make_request(make_prompt(4), request_id=str(i)) for i in range(4)]
    before = len(copies.fetched)
    node.step([Scheduled(request, 4)])
    assert len(copies.fetched) - before == 3
