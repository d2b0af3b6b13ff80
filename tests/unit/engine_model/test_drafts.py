"""Steps with drafts say what steps without any do, whatever a request asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.own_text import OwnText
from pdserve.engine.drafts.source import Source
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.protocol import BadWord
from pdserve.shared.clock import ManualClock
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

SEEDED = {"temperature": 0.8, "seed": 5}
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": SEEDED,
    "filtered": SEEDED | {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": SEEDED | {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": {7: 2.0, 9: -3.0}, "min_tokens": 12},
    "bad words": {"bad_words": [BadWord([3]), BadWord([5, 6]), BadWord([9, 8, 7])]},
    "few ids": SEEDED | {"allowed_token_ids": list(range(0, 200, 3))},
    "log-probabilities": SEEDED | {"logprobs": 3},
    "stops": {"stop_token_ids": list(range(0, 250, 7)), "min_tokens": 5},
    "all": SEEDED
    | {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "logprobs": 2, "logit_bias": {4: 1.0}},
}
NUM_TOKENS = 40


class Told:
    """A source that knows the answer of each prompt, and is wrong now and then."""

    name = "told"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._answers = answers
        self._random = random.Random(seed)

    def drafter(self, request: Request) -> Told:
        return self

    def propose(self, request: Request, most: int) -> tuple[list[int], int]:
        begin = len(request.output_token_ids)
        answer = self._answers[tuple(request.prompt_token_ids)]
        known = answer[begin : begin + min(most, self._random.randint(0, 7))]
        return [t if self._random.random() < 0.8 else 1 for t in known], 3


class Decodes:
    """A policy of decodes only."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        return queues.plan_decodes(64)


def requests() -> list[Request]:
    return [
        make_request(make_prompt(9 + 5 * number, number), max_tokens=NUM_TOKENS, **options)
        for number, options in enumerate(OPTIONS.values())
    ]


def answers(
    node: Node, requests: Iterable[Request], speculate: Callable[[BlockPool], object] | None
) -> list[list[SampledToken]]:
    """All tokens but the first of each request, computed together."""
    pool = BlockPool(node.kv_cache.num_blocks, node.kv_cache.layout.block_size)
    core = EngineCore(Queues(pool, ManualClock()), Decodes(), frozenset({2}))
    if speculate is not None:
        core.speculate = speculate(pool)
    said: dict[Request, list[SampledToken]] = {}
    for request in requests:
        request.block_table = pool.allocate(pool.blocks_for(request.num_tokens + 1))
        (first,) = node.runner.execute([Scheduled(request, request.num_tokens)])
        request.num_computed_tokens = request.num_tokens
        request.output_token_ids.append(first.token_id)
        core.adopt(request)
        said[request] = []
    while rows := core.begin_step():
        sampled = core.accepted(rows, node.runner.execute(rows))
        for row, token in zip(rows, sampled, strict=True):
            said[row.request] += [token, *token.after]
        for request in core.end_step(rows, sampled, 0.0):
            core.forget(request)
    return list(said.values())


def plain(said: list[list[SampledToken]]) -> list[list[tuple[int, object]]]:
    return [[(token.token_id, token.logprobs) for token in tokens] for tokens in said]


@pytest.fixture
def node(checkpoint_of: Callable[..., Path], kind: DecoderKind) -> Node:
    return Node.load(checkpoint_of("llama"), kind)


def always(pool: BlockPool, *sources: Source) -> Speculation:
    return Speculation(pool, lambda shape: 1.0, 256, sources)


@pytest.mark.parametrize("seed", range(2))
def test_right_and_wrong_drafts_change_nothing(node: Node, seed: int) -> None:
    expected = answers(node, requests(), None)
    told = Told(
        {
            tuple(request.prompt_token_ids): [first, *(token.token_id for token in tokens)]
            for request, first, tokens in zip(requests(), firsts(node), expected, strict=True)
        },
        seed,
    )
    speculations = []

    def speculate(pool: BlockPool) -> Speculation:
        speculations.append(always(pool, told))
        return speculations[0]

    asked = requests()
    found = answers(node, asked, speculate)
    assert plain(found) == plain(expected)
    counts = speculations[0].counts["told"]
    assert 0.2 * counts.drafted < counts.accepted < 0.9 * counts.drafted


def test_drafts_from_a_streams_own_text_change_nothing(node: Node) -> None:
    few = SEEDED | {"allowed_token_ids": [3, 4, 5], "max_tokens": NUM_TOKENS}
    speculations = []

    def speculate(pool: BlockPool) -> Speculation:
        speculations.append(always(pool, OwnText()))
        return speculations[0]

    (expected,) = answers(node, [make_request(make_prompt(9), **few)], None)
    (found,) = answers(node, [make_request(make_prompt(9), **few)], speculate)
    assert plain([found]) == plain([expected])
    assert speculations[0].counts["text"].accepted > 0


def firsts(node: Node) -> list[int]:
    """Token 1 of each request."""
    return [first_of(node, request) for request in requests()]


def first_of(node: Node, request: Request) -> int:
    request.block_table = list(range(node.kv_cache.layout.blocks_for(request.num_tokens)))
    (token,) = node.runner.execute([Scheduled(request, request.num_tokens)])
    return token.token_id
