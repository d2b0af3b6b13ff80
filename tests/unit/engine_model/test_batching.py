"""The same tokens however a request is chunked, batched, resumed, or moved to another pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.engine.request import Scheduled
from pdserve.kv import KvDtype
from tests.matrix import matrix
from tests.reference import Reference
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

Checkpoints = Callable[..., Path]
WINDOWED = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}


@pytest.fixture(scope="module")
def node(kind: DecoderKind, checkpoint_of: Checkpoints) -> Node:
    """Query and key norms, and a layer with a window: whatever could go wrong, can."""
    return Node.load(checkpoint_of("qwen3", **WINDOWED), kind, num_tokens=2**15)


def greedy(node: Node, prompt: list[int], num_tokens: int, chunk: int = 10**6) -> list[int]:
    request = make_request(prompt)
    node.generate([request], num_tokens, chunk)
    node.free += request.block_table
    return request.output_token_ids


@pytest.mark.parametrize("num_prompt", matrix([1, 2, 15, 16, 17, 1000, 3000], 6))
def test_prompts_of_any_length(num_prompt: int, node: Node, checkpoint_of: Checkpoints) -> None:
    prompt = make_prompt(num_prompt, seed=num_prompt)
    expected = Reference(checkpoint_of("qwen3", **WINDOWED)).greedy(prompt, 6)
    assert greedy(node, prompt, 6) == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 199])
def test_chunked_prefill_is_whole_prefill(chunk: int, node: Node) -> None:
    prompt = make_prompt(200)
    assert greedy(node, prompt, 8, chunk) == greedy(node, prompt, 8)


def test_ragged_batch_is_each_alone(node: Node) -> None:
    prompts = [make_prompt(1 + 13 * i % 97, seed=i) for i in range(32)]
    alone = [greedy(node, prompt, 10) for prompt in prompts]
    together = [make_request(prompt) for prompt in prompts]
    node.generate(together, 10, chunk=40)  # so that prefill and decode share steps
    assert [request.output_token_ids for request in together] == alone


def test_random_tokens_do_not_depend_on_the_batch(node: Node) -> None:
    def requests() -> list:
        return [
            make_request(
                make_prompt(5 + 11 * i, seed=i), temperature=0.9, top_p=0.95, top_k=50, seed=i
            )
            for i in range(12)
        ]

    alone, together = requests(), requests()
    for request in alone:
        node.generate([request], 8)
    node.generate(together, 8, chunk=32)
    assert [r.output_token_ids for r in together] == [r.output_token_ids for r in alone]


def test_recomputing_prompt_and_output_resumes(node: Node) -> None:
    prompt = make_prompt(50)
    sampling = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}
    whole = make_request(prompt, **sampling)
    node.generate([whole], 20)
    resumed = make_request(prompt, whole.output_token_ids[:9], **sampling)
    node.generate([resumed], 20, chunk=23)
    assert resumed.output_token_ids == whole.output_token_ids


def test_kv_blocks_can_move_to_another_pool(
    node: Node, kind: DecoderKind, checkpoint_of: Checkpoints
) -> None:
    prompt = make_prompt(50)
    expected = greedy(node, prompt, 10)
    request = make_request(prompt)
    node.generate([request], 1)
    other = Node.load(checkpoint_of("qwen3", **WINDOWED), kind)
    blocks = [other.free.pop(0) for _ in request.block_table]
    other.kv_cache.pool[blocks] = node.kv_cache.pool[request.block_table]
    request.block_table = blocks
    other.generate([request], 10)
    assert request.output_token_ids == expected


def test_a_batch_without_sampling(node: Node) -> None:
    request = make_request(make_prompt(30))
    assert node.step([Scheduled(request, 10)]) == [None]
    assert node.runner.execute([]) == []


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_any_block_size(
    block_size: int, node: Node, kind: DecoderKind, checkpoint_of: Checkpoints
) -> None:
    path = checkpoint_of("qwen3", **WINDOWED)
    other = Node.load(path, kind, block_size=block_size, num_tokens=512)
    prompt = make_prompt(75)
    assert greedy(other, prompt, 6, chunk=20) == greedy(node, prompt, 6)


@pytest.mark.parametrize("family", matrix(["llama", "qwen2", "qwen3"], 1))
def test_bfloat16_is_as_close_to_float32_as_transformers(
    family: str, kind: DecoderKind, checkpoint_of: Checkpoints
) -> None:
    path = checkpoint_of(family, dtype=torch.bfloat16)
    node = Node.load(path, kind, dtype=KvDtype.BFLOAT16)
    prompt = make_prompt(100)
    ours = node.logits(prompt)
    exact = Reference(path).logits(prompt)
    theirs = Reference(path, torch.bfloat16).logits(prompt)
    assert node.model.dtype == torch.bfloat16
    # As close to the float32 result as transformers is in bfloat16.
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()
    assert greedy(node, prompt, 8, chunk=30) == greedy(node, prompt, 8)
