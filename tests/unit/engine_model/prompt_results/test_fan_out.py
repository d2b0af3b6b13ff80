"""Token 1 of several answers to one prompt is what each would have got alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.request import Request, Scheduled
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

PARAMS: list[dict[str, object]] = [
    {"temperature": 1.0, "seed": 1, "logprobs": 3},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 0.0, "logit_bias": {65: 100.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
]


@pytest.fixture(scope="module")
def node(kind: DecoderKind, checkpoint_of: Callable[..., Path]) -> Node:
    return Node.load(checkpoint_of("qwen3"), kind, num_tokens=2**12)


def answers(prompt: list[int], name: str) -> list[Request]:
    return [
        make_request(prompt, request_id=f"{name}-{i}", **params) for i, params in enumerate(PARAMS)
    ]


@pytest.mark.parametrize("num_prompt", [1, 40])
def test_as_if_each_were_alone(node: Node, num_prompt: int) -> None:
    prompts = [make_prompt(num_prompt, seed=seed) for seed in (1, 2)]
    alone = [
        [node.step([Scheduled(answer, num_prompt)])[0] for answer in answers(prompt, "alone")]
        for prompt in prompts
    ]
    fans = [answers(prompt, f"fan{i}") for i, prompt in enumerate(prompts)]
    for first, *others in fans:
        first.siblings = others
    other = make_request(make_prompt(5, seed=3))
    rows = [
        Scheduled(fans[0][0], num_prompt),
        Scheduled(other, 3),  # not to its end
        Scheduled(fans[1][0], num_prompt),
    ]
    one, nothing, two = node.step(rows)
    assert nothing is None
    for fanned, expected in zip((one, two), alone, strict=True):
        assert fanned is not None
        first, *others = expected
        assert first is not None
        assert [fanned.token_id, *(s.token_id for s in fanned.siblings)] == [
            token.token_id for token in expected if token is not None
        ]
        logprobs = [fanned.logprobs, *(s.logprobs for s in fanned.siblings)]
        for found, token in zip(logprobs, expected, strict=True):
            assert token is not None
            assert (found is None) == (token.logprobs is None)
            if found is not None and token.logprobs is not None:
                assert found.top_ids == token.logprobs.top_ids
                assert found.chosen == pytest.approx(token.logprobs.chosen, abs=1e-5)
