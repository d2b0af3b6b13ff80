"""Steps with drafts on the CUDA path say what steps without any do, in graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import matrix

pytest.importorskip("triton")

from pdserve.engine.request import Request
from pdserve.protocol import BadWord
from tests.fakes.late_copies import PromptCopies
from tests.requests import make_request
from tests.unit.engine_cuda.test_launch_counts import cuda_node
from tests.unit.engine_model.drafted import Said, Streams, Told, answers, run, tokens_of
from tests.unit.engine_model.harness import make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")

SEEDED = {"temperature": 0.8, "seed": 5}
OPTIONS: dict[str, dict[str, object]] = {
    "seeded": SEEDED | {"top_p": 0.9, "logprobs": 2, "frequency_penalty": 0.4},
    "greedy": {
        "logit_bias": {7: 2.0},
        "min_tokens": 9,
        "bad_words": [BadWord([5, 6])],
        "repetition_penalty": 1.2,
        "allowed_token_ids": list(range(0, 200, 3)),
    },
}


def requests() -> list[Request]:
    return [
        make_request(make_prompt(3 + 2 * n, n), request_id=name, max_tokens=7, **options)
        for n, (name, options) in enumerate(OPTIONS.items())
    ]


def expect_same(found: dict[str, Said], expected: dict[str, Said]) -> None:
    """Of log-probabilities up to their last bits: rows beside may change them."""
    assert tokens_of(found) == tokens_of(expected)
    for name, (tokens, end) in expected.items():
        assert found[name][1] == end
        for (_, one), (_, other) in zip(found[name][0], tokens, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.top_ids == other.top_ids
                assert one.chosen == pytest.approx(other.chosen, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "limits",
    matrix(
        [
            {"has_graphs": True, "buckets": (2, 8, 16)},
            {"has_graphs": True, "buckets": (2,), "pieces": (8, 16)},
            {"has_graphs": False},
            {"has_graphs": True, "buckets": (2, 8, 16), "most_draws": 3},
            {"has_graphs": True, "buckets": (2, 8, 16), "family": "gemma2"},
        ],
        1,
    ),
    ids=str,
)
def test_right_and_wrong_drafts_change_nothing(tmp_path: Path, limits: dict[str, Any]) -> None:
    node = cuda_node(tmp_path, 1, PromptCopies(), **limits)
    expected = answers(node, requests())
    streams = Streams(node, [Told(tokens_of(expected), 0, right=0.6)])
    run(streams, requests())
    expect_same(streams.answers(), expected)
    counts = streams.speculation.counts["told"]
    assert 0 < counts.accepted < counts.drafted
