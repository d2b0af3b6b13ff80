"""Steps with drafts on the CUDA path say what steps without any do, in graphs and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import matrix

pytest.importorskip("triton")

from pdserve.engine.request import Request
from pdserve.protocol import BadWord
from tests.checkpoints import make_checkpoint
from tests.fakes.late_copies import PromptCopies
from tests.requests import make_request
from tests.unit.engine_cuda.test_launch_counts import cuda_node
from tests.unit.engine_cuda.test_ranks import cuda_decoders
from tests.unit.engine_model.drafted import Said, Streams, Told, answers, run, tokens_of
from tests.unit.engine_model.harness import Node, make_prompt
from tests.unit.engine_model.test_draft_model import add_model
from tests.unit.engine_model.threaded_ranks import threaded_node

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
        make_request(make_prompt(3 + 2 * n, n), request_id=name, max_tokens=5, **options)
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
    ("limits", "num_requests"),
    matrix(
        [
            ({"has_graphs": True, "buckets": (2, 8, 16)}, 1),
            ({"has_graphs": True, "buckets": (2, 8, 16)}, 2),
            ({"has_graphs": True, "buckets": (2,), "pieces": (8, 16)}, 2),
            ({"has_graphs": False}, 2),
            ({"has_graphs": True, "buckets": (2, 8, 16), "most_draws": 3}, 2),
        ],
        1,
    ),
    ids=str,
)
def test_right_and_wrong_drafts_change_nothing(
    tmp_path: Path, limits: dict[str, Any], num_requests: int
) -> None:
    check(cuda_node(tmp_path, 1, PromptCopies(), **limits), requests()[:num_requests])


@pytest.mark.long  # one rank does by default
@pytest.mark.parametrize(("num_ranks", "num_stages"), matrix([(2, 1), (1, 2)], 1))
def test_ranks_compute_them_together(tmp_path: Path, num_ranks: int, num_stages: int) -> None:
    """Each has the batch's rows, and so replays the same graph."""
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=2, max_position_embeddings=64)
    make = cuda_decoders([], (2, 8, 16))
    sizes = {"num_stages": num_stages, "num_blocks": 40, "block_size": 8}
    with threaded_node(path, num_ranks, make, **sizes) as (node, _):
        check(node, requests()[1:])


@pytest.mark.long  # drafts that are told do by default
def test_a_draft_model_on_the_same_device_changes_nothing(tmp_path: Path) -> None:
    """Its steps are replayed as the model's are; here it is the same model."""
    limits: dict[str, Any] = {"has_graphs": True, "buckets": (2, 8, 16)}
    node, drafter = (
        cuda_node(tmp_path / name, 1, PromptCopies(), **limits) for name in ("model", "draft")
    )
    expected = answers(node, copies(requests()))
    streams = Streams(node, [])
    add_model(streams, drafter)
    run(streams, requests())
    expect_same(streams.answers(), expected)
    counts = streams.speculation.counts["model"]
    assert counts.accepted > 0.7 * counts.drafted > 0


def check(node: Node, asked: list[Request]) -> None:
    expected = answers(node, copies(asked))
    streams = Streams(node, [Told(tokens_of(expected), 0, right=0.6)])
    run(streams, asked)
    expect_same(streams.answers(), expected)
    counts = streams.speculation.counts["told"]
    assert 0 < counts.accepted < counts.drafted


def copies(asked: list[Request]) -> list[Request]:
    """The same, as they come."""
    return [replace(one, output_token_ids=[], block_table=[], block_hashes=[]) for one in asked]
