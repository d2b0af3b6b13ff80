"""Embeddings: transformers' final hidden states, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.request import Request, Scheduled
from pdserve.kv import KvDtype
from pdserve.shared.errors import UnusableLogits
from pdserve.shared.pooling import Pooling
from tests.matrix import matrix
from tests.reference import Reference
from tests.requests import make_request, work_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

FAMILIES = ["llama", "qwen3"]


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of(request.param)


@pytest.fixture
def node(kind: DecoderKind, path: Path) -> Node:
    return Node.load(path, kind, num_tokens=1024)


def embedder(prompt: list[int], pooling: Pooling, **fields: str) -> Request:
    return make_request(prompt, max_tokens=0, pooling=pooling, **fields)


def compute(node: Node, requests: list[Request], chunk: int) -> None:
    """Their prompts, and one token of those that want any."""
    while rows := [
        Scheduled(request, min(chunk, request.num_uncomputed_tokens))
        for request in requests
        if request.num_uncomputed_tokens and not request.output_token_ids
    ]:
        node.step(rows)


def embedding(request: Request) -> npt.NDArray[np.float32]:
    return np.frombuffer(work_of(request).embedding, dtype="<f4")


def expected(states: torch.Tensor, pooling: Pooling) -> npt.NDArray[np.float32]:
    match pooling:
        case Pooling.LAST:
            return states[-1].numpy()
        case Pooling.MEAN:
            return states.mean(dim=0).numpy()
        case Pooling.FIRST:
            return states[0].numpy()


@pytest.mark.parametrize("chunk", matrix([1, 7, 10**6], {7}))
def test_embeddings_are_those_of_transformers(node: Node, path: Path, chunk: int) -> None:
    """Beside ordinary prompts, and beside some whose own tokens are scored, part by part."""
    node.runner = ModelRunner(
        node.model, node.kv_cache, scored_logits_bytes=5 * 4 * node.model.config.vocab_size
    )
    embedders = [embedder(make_prompt(21 + p, seed=p), p) for p in Pooling]
    plain = make_request(make_prompt(19, seed=8), max_tokens=1)
    scored = make_request(make_prompt(25, seed=9), max_tokens=1, prompt_logprobs=0)
    compute(node, [embedders[0], scored, embedders[1], plain, embedders[2]], chunk)
    reference = Reference(path)
    for request in embedders:
        assert request.sampling.pooling is not None
        states = reference.states(request.prompt_token_ids)
        assert states.std() > 0.5, "states that are all alike would compare nothing"
        wanted = expected(states, request.sampling.pooling)
        np.testing.assert_allclose(embedding(request), wanted, atol=2e-4)
        assert request.output_token_ids == []
    for request in (plain, scored):
        logits = reference.logits(request.prompt_token_ids)
        assert request.output_token_ids == [int(logits[-1].argmax())]
    assert plain.prompt_work is None
    assert work_of(scored).embedding == b""
    assert len(work_of(scored).logprobs) == 24


def test_the_last_state_is_found_over_cached_kv(node: Node, path: Path) -> None:
    prompt = make_prompt(40)
    first, again = embedder(prompt, Pooling.LAST), embedder(prompt, Pooling.LAST)
    compute(node, [first], 10**6)
    assert again.num_reusable_tokens == 39
    again.block_table, again.num_computed_tokens = first.block_table[:2], 32
    compute(node, [again], 10**6)
    np.testing.assert_allclose(embedding(again), embedding(first), atol=1e-5)
    np.testing.assert_allclose(embedding(again), Reference(path).states(prompt)[-1], atol=2e-4)


def test_a_mean_goes_on_behind_what_is_pooled(node: Node, path: Path) -> None:
    request = embedder(make_prompt(40), Pooling.MEAN)
    assert request.num_reusable_tokens == 0
    node.step([Scheduled(request, 25)])
    assert request.num_reusable_tokens == 25
    request.num_computed_tokens = 16  # it gave way, and one block is still cached
    compute(node, [request], 9)
    wanted = Reference(path).states(request.prompt_token_ids).mean(dim=0)
    np.testing.assert_allclose(embedding(request), wanted, atol=2e-4)


def test_of_the_first_token_nothing_else_is_needed(node: Node) -> None:
    request = embedder(make_prompt(40), Pooling.FIRST)
    assert request.num_reusable_tokens == 0
    node.step([Scheduled(request, 5)])
    assert request.num_reusable_tokens == 39


def test_a_step_that_is_done_again_pools_once(node: Node) -> None:
    request = embedder(make_prompt(20), Pooling.MEAN)
    request.block_table = [node.free.pop(), node.free.pop()]
    rows = [Scheduled(request, 12)]
    node.runner.execute(rows)
    node.runner.execute(rows)
    assert work_of(request).num_pooled_states == 12
    node.step(rows)
    compute(node, [request], 10**6)
    assert work_of(request).num_pooled_states == 20


def test_damaged_states_are_blamed_on_their_request(node: Node) -> None:
    good, bad = (
        embedder(make_prompt(30, seed), Pooling.MEAN, request_id=name)
        for seed, name in enumerate(("good", "bad"))
    )
    node.step([Scheduled(good, 16), Scheduled(bad, 16)])
    node.kv_cache.pool[bad.block_table[0]] = torch.nan
    for request in (good, bad):
        request.block_table.append(node.free.pop())
    with pytest.raises(UnusableLogits) as raised:
        node.runner.execute([Scheduled(good, 10), Scheduled(bad, 10)])
    assert raised.value.request_ids == ["bad"]


def test_in_bfloat16_states_are_not_rounded(checkpoint_of: Callable[..., Path]) -> None:
    path = checkpoint_of("llama")
    node = Node.load(path, dtype=KvDtype.BFLOAT16, num_tokens=1024)
    request = embedder(make_prompt(30), Pooling.LAST)
    compute(node, [request], 10**6)
    found = embedding(request)
    assert not np.array_equal(found, torch.tensor(found).bfloat16().float().numpy())
    wanted = Reference(path).states(request.prompt_token_ids)[-1].numpy()
    cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert cosine > 0.99


def test_bits_do_not_depend_on_chunks_or_neighbours(checkpoint_of: Callable[..., Path]) -> None:
    """The native decoder's promise for logits holds for states."""
    node = Node.load(checkpoint_of("llama"), dtype=KvDtype.BFLOAT16, num_tokens=1024)
    prompt = make_prompt(50)
    alone = [embedder(prompt, pooling) for pooling in Pooling]
    for request in alone:
        compute(node, [request], 10**6)
    together = [embedder(prompt, pooling) for pooling in Pooling]
    compute(node, [*together, make_request(make_prompt(33, 1), max_tokens=1)], 13)
    assert [work_of(r).embedding for r in together] == [work_of(r).embedding for r in alone]
