"""Answers with grammars and any other options say with drafts what they say without."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.demo_model import CHECKPOINT_PATH, DRAFT_PATH
from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.texts import FormerAnswers, OwnText, Predictions
from pdserve.engine.grammar.position import Position
from pdserve.engine.request import Request
from pdserve.kv import KvDtype
from pdserve.lifecycle import Targets
from pdserve.protocol import BadWord
from pdserve.shared.errors import PdserveError
from tests.adapters import make_adapter
from tests.lives.planted import Bug, planted
from tests.matrix import matrix
from tests.unit.engine_adapters.test_adapted import take
from tests.unit.engine_grammar.answers import DemoModel
from tests.unit.engine_model.drafted import (
    Said,
    Streams,
    Told,
    Unhurried,
    answers,
    run,
    tokens_of,
)
from tests.unit.engine_model.harness import Node
from tests.unit.engine_model.test_draft_model import add_model

GRAMMARS = (
    "",
    "start: /[a-z ]{1,40}/",
    'start: e\ne: e " " e | "a" | "b" | "ab" | "ba" | /[a-z]+/',
    json.dumps({"grammars": [{"json_schema": {"type": "object"}}]}),
    json.dumps(
        {
            "grammars": [
                {
                    "json_schema": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "maxLength": 12},
                            "colour of it": {"enum": ["light green", "light blue", "grey"]},
                            "sizes": {"type": "array", "items": {"type": "integer"}},
                        },
                        "required": ["name", "colour of it", "sizes"],
                        "additionalProperties": False,
                    }
                }
            ]
        }
    ),
)
# One of each, or none of it: each with each other comes up.
OPTIONS: Sequence[Sequence[dict[str, Any]]] = (
    ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0}),
    ({}, {"top_p": 0.9}, {"top_k": 30, "min_p": 0.02}),
    ({}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5, "presence_penalty": 0.3}),
    ({}, {"logit_bias": {262: 2.0, 300: -4.0}}),
    ({}, {"bad_words": [BadWord([301]), BadWord([262, 300])]}),
    ({}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 1, "logprob_token_ids": [7, 300]}),
    ({}, {"stop_token_ids": [305, 280]}, {"min_tokens": 4}),
)


def make_requests(demo: DemoModel, seed: int, adapters: Sequence[str] = ("",)) -> list[Request]:
    """The same for the same seed. `adapters`: digests, of which each has one."""
    chosen = random.Random(seed)
    made = []
    for number in range(12):
        options: dict[str, Any] = {"max_tokens": chosen.choice([1, 2, 17, 48])}
        options["adapter"] = adapters[number % len(adapters)]
        for one_of in OPTIONS:
            options |= chosen.choice(one_of)
        made.append(
            demo.request(chosen.choice(GRAMMARS), chosen.randrange(100), f"r{number}", **options)
        )
    return made


@pytest.mark.parametrize("seed", matrix(range(40), 2))
def test_random_requests_say_the_same(demo: DemoModel, seed: int) -> None:
    expect_the_same(demo, seed)


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": KvDtype.BFLOAT16},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV int8": {"kv_dtype": KvDtype.INT8},
    "KV fp8": {"kv_dtype": KvDtype.FP8},
    "adapters": {},
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_500_random_requests_say_the_same(form: str, tmp_path: Path) -> None:
    """Of each pair of an option and what computes them; also with a model that guesses."""
    demo = DemoModel(Node.load(CHECKPOINT_PATH, num_tokens=16384, **FORMS[form]))
    drafter, adapters = Node.load(DRAFT_PATH, num_tokens=16384), [""]
    if form == "adapters":
        for number in range(2):
            folder = make_adapter(tmp_path / str(number), CHECKPOINT_PATH, seed=number)
            adapters.append(take(demo.node, folder).digest)
    for seed in range(42):
        expected = expect_the_same(demo, seed, adapters)
        streams = Streams(demo.node, [], Unhurried(), demo.eos)
        source = add_model(streams, drafter, vocab_size=demo.node.model.config.vocab_size)
        run(streams, make_requests(demo, seed, adapters), random.Random(seed))
        assert streams.answers() == expected
        assert source.work.tokens > 0


def expect_the_same(demo: DemoModel, seed: int, adapters: Sequence[str] = ("",)) -> dict[str, Said]:
    """Guessed by who knows better or worse, moved and preempted at any time; and then asked again.

    What clients predict has errors.
    """
    expected = answers(demo.node, make_requests(demo, seed, adapters), demo.eos)
    known, masks, former = tokens_of(expected), Unhurried(), FormerAnswers()
    chosen = random.Random(seed)
    for sources in ([Told(known, seed), OwnText()], [Predictions(), former], [former, OwnText()]):
        streams = Streams(demo.node, sources, masks, demo.eos)
        asked = make_requests(demo, seed, adapters)
        for number, request in enumerate(asked):
            request.targets = Targets(tenant=["ann", "bob"][number % 2])
            request.prediction = [
                token if chosen.random() < 0.9 else 300 for token in known[request.request_id]
            ]
        run(streams, asked, random.Random(seed))
        assert streams.answers() == expected
        counts = streams.speculation.counts
        assert counts[sources[0].name].accepted > 0
    return expected


SLIPS = {
    "a wrong draft is taken for right": Bug(
        EngineCore, "_accepted", "previous.token_id != draft", "False"
    ),
    "rows of wrong drafts are counted, so hashed and announced": Bug(
        EngineCore, "end_step", "num_tokens = 1 + len(token.after)", "pass"
    ),
    "a grammar goes along a draft, and along its token again": Bug(
        Position, "fill_ahead", "self._matcher.deep_copy()", "self._matcher"
    ),
}


@pytest.mark.parametrize("slip", matrix(SLIPS, 1))
def test_a_planted_slip_is_found(demo: DemoModel, slip: str) -> None:
    """What holds drafts to the truth can fail."""
    expected = answers(demo.node, make_requests(demo, 0), demo.eos)
    told = Told(tokens_of(expected), 0)
    streams = Streams(demo.node, [told], Unhurried(), demo.eos)
    with planted(SLIPS[slip]):
        try:
            run(streams, make_requests(demo, 0), random.Random(0))
        except (AssertionError, IndexError, PdserveError):
            return
    assert streams.answers() != expected


def test_what_a_grammar_forces_is_right(demo: DemoModel) -> None:
    masks = Unhurried()
    streams = Streams(demo.node, [], masks, demo.eos)
    run(streams, [demo.request(GRAMMARS[-1], seed, str(seed)) for seed in range(3)])
    counts = streams.speculation.counts["grammar"]
    assert counts.accepted == counts.drafted > 6
