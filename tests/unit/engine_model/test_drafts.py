"""Steps with drafts say what steps without any do, whatever a request asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.drafts.texts import OwnText
from pdserve.engine.request import Request
from pdserve.kv import KvDtype
from pdserve.protocol import BadWord
from tests.requests import make_request
from tests.unit.engine_model.drafted import Streams, Told, answers, run, tokens_of
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


def requests() -> list[Request]:
    return [
        make_request(
            make_prompt(9 + 5 * number, number), request_id=name, max_tokens=NUM_TOKENS, **options
        )
        for number, (name, options) in enumerate(OPTIONS.items())
    ]


@pytest.fixture
def node(checkpoint_of: Callable[..., Path], kind: DecoderKind) -> Node:
    return Node.load(checkpoint_of("llama"), kind)


@pytest.mark.parametrize("seed", range(2))
def test_right_and_wrong_drafts_change_nothing(node: Node, seed: int) -> None:
    expect_equal_answers(node, seed)


@pytest.mark.parametrize("kv_dtype", [KvDtype.INT8, KvDtype.FP8])
def test_drafts_over_kv_in_codes_change_nothing(
    checkpoint_of: Callable[..., Path], kv_dtype: KvDtype
) -> None:
    """A refused row's codes, and their scale, are overwritten; no other row has seen them."""
    expect_equal_answers(
        Node.load(checkpoint_of("llama"), DecoderKind.SERVED, kv_dtype=kv_dtype), 0
    )


def expect_equal_answers(node: Node, seed: int) -> None:
    expected = answers(node, requests())
    streams = Streams(node, [Told(tokens_of(expected), seed)])
    run(streams, requests())
    assert streams.answers() == expected
    counts = streams.speculation.counts["told"]
    assert 0.2 * counts.drafted < counts.accepted < 0.9 * counts.drafted


def test_drafts_from_a_streams_own_text_change_nothing(node: Node) -> None:
    few = SEEDED | {"allowed_token_ids": [3, 4, 5], "max_tokens": NUM_TOKENS}
    asked = [make_request(make_prompt(9), request_id="few", **few) for _ in range(2)]
    streams = Streams(node, [OwnText()])
    run(streams, asked[:1])
    assert streams.answers() == answers(node, asked[1:])
    assert streams.speculation.counts["text"].accepted > 0
