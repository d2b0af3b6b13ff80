"""Log-probabilities of prompts: what one plain step says, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.prompt_results.results import scored_positions
from pdserve.engine.request import Request, Scheduled
from pdserve.protocol import TokenLogprobs
from pdserve.shared.errors import UnusableLogits
from tests.matrix import matrix
from tests.requests import make_request, work_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

NUM_TOP = 3


@pytest.fixture
def node(kind: DecoderKind, checkpoint_of: Callable[..., Path]) -> Node:
    return Node.load(checkpoint_of("llama"), kind, num_tokens=1024)


def with_rows_at_once(node: Node, num_rows: int) -> None:
    """So many rows of logits is all that there is memory for."""
    num_bytes = num_rows * 4 * node.model.config.vocab_size
    node.runner = ModelRunner(node.model, node.kv_cache, scored_logits_bytes=num_bytes)


def assert_scores(node: Node, prompt: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
    logprobs = node.logits(prompt)[:-1].log_softmax(dim=-1)
    assert len(found) == len(prompt) - 1
    for row, token_id, score in zip(logprobs, prompt[1:], found, strict=True):
        assert score.chosen == pytest.approx(row[token_id].item(), abs=1e-4)
        assert score.top_logprobs == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=1e-4)
        assert row[score.top_ids].tolist() == pytest.approx(score.top_logprobs, abs=1e-4)
        assert score.rank == int((row > row[token_id]).sum()) + 1


@pytest.mark.parametrize("num_rows", matrix([1, 7, 16, 10_000], {7, 16}))
@pytest.mark.parametrize("chunk", [5, 16, 10**6])
def test_scores_do_not_depend_on_chunks_or_parts(node: Node, num_rows: int, chunk: int) -> None:
    with_rows_at_once(node, num_rows)
    prompts = [make_prompt(length, seed=length) for length in (40, 2, 33)]
    scored = [make_request(prompt, prompt_logprobs=NUM_TOP) for prompt in prompts]
    plain = make_request(make_prompt(21, seed=9))
    requests = [scored[0], plain, *scored[1:]]
    node.generate(requests, 3, chunk)
    for request, prompt in zip(scored, prompts, strict=True):
        assert_scores(node, prompt, work_of(request).logprobs)
    assert plain.prompt_work is None
    alone = [make_request(request.prompt_token_ids) for request in requests]
    for request in alone:
        node.generate([request], 3)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in alone]


def test_a_prompt_of_one_token_has_none(node: Node) -> None:
    request = make_request([5], prompt_logprobs=0)
    node.generate([request], 1)
    assert work_of(request).logprobs == []


def test_without_likeliest_ones_the_chosen_are_there(node: Node) -> None:
    request = make_request(make_prompt(9), prompt_logprobs=0)
    node.generate([request], 1)
    assert [score.top_ids for score in work_of(request).logprobs] == [[]] * 8
    assert all(score.chosen < 0 for score in work_of(request).logprobs)


def test_a_step_that_is_done_again_scores_once(node: Node) -> None:
    with_rows_at_once(node, 4)
    request = make_request(make_prompt(20), prompt_logprobs=NUM_TOP)
    request.block_table = [node.free.pop(), node.free.pop()]
    rows = [Scheduled(request, 12)]
    node.runner.execute(rows)
    node.runner.execute(rows)
    node.step(rows)
    node.generate([request], 1)
    assert_scores(node, request.prompt_token_ids, work_of(request).logprobs)


def test_a_prompt_that_is_begun_anew_goes_on_scoring_where_it_was(node: Node) -> None:
    request = make_request(make_prompt(40), prompt_logprobs=NUM_TOP)
    node.step([Scheduled(request, 25)])
    assert request.num_reusable_tokens == 25
    request.num_computed_tokens = 16  # it gave way, and one block is still cached
    node.generate([request], 1)
    assert_scores(node, request.prompt_token_ids, work_of(request).logprobs)
    assert request.num_reusable_tokens == 40  # all is known, so its KV may come from anywhere


def test_layers_are_reported_when_all_parts_are_there(node: Node) -> None:
    with_rows_at_once(node, 4)
    request = make_request(make_prompt(20), prompt_logprobs=0)
    request.block_table = [node.free.pop(), node.free.pop()]
    last_slot = node.kv_cache.pool[request.block_table[1], :, :, :, 3]  # of token 20
    heard: list[tuple[int, bool]] = []

    def done(num_layers: int) -> None:
        heard.append((num_layers, bool(last_slot[:num_layers].isfinite().all())))

    num_layers = node.model.config.num_layers
    ends = tuple(range(1, num_layers + 1))
    node.runner.execute([Scheduled(request, 20)], LayerProgress(ends, done))
    assert heard == [(end, True) for end in ends]


def test_damaged_logits_are_blamed_on_their_request(node: Node) -> None:
    good, bad = (
        make_request(make_prompt(30, seed), request_id=name, prompt_logprobs=0)
        for seed, name in enumerate(("good", "bad"))
    )
    node.step([Scheduled(good, 10), Scheduled(bad, 10)])
    node.kv_cache.pool[bad.block_table[0]] = torch.nan
    for request in (good, bad):
        request.block_table.append(node.free.pop())
    with pytest.raises(UnusableLogits) as raised:
        node.runner.execute([Scheduled(good, 10), Scheduled(bad, 10)])
    assert raised.value.request_ids == ["bad"]


def test_what_may_be_reused() -> None:
    plain, scored = make_request(make_prompt(40)), make_request(make_prompt(40), prompt_logprobs=0)
    assert (plain.num_reusable_tokens, scored.num_reusable_tokens) == (39, 0)
    assert _num_scored(plain, 40) == 0
    assert _num_scored(scored, 40) == 39
    assert _num_scored(scored, 12) == 12


def _num_scored(request: Request, num_tokens: int) -> int:
    return len(scored_positions(Scheduled(request, num_tokens)))
