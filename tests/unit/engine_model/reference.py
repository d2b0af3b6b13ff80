"""Whether a node computes what transformers does."""

from __future__ import annotations

from pathlib import Path

from tests.reference import Reference
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt


def assert_matches(
    path: Path, kind: DecoderKind, num_prompt: int = 200, num_output: int = 12
) -> None:
    """Equal logits, but for roundings of float32, and equal greedy tokens, for one prompt."""
    assert_node_matches(path, Node.load(path, kind), num_prompt, num_output)


def assert_node_matches(
    path: Path, node: Node, num_prompt: int = 200, num_output: int = 12
) -> None:
    """The same of a node that has loaded this checkpoint."""
    reference = Reference(path)
    prompt = make_prompt(num_prompt)
    expected = reference.logits(prompt)
    difference = (node.logits(prompt) - expected).abs()
    # Against float64, either of the two is up to 1.4e-4 off, and 1e-5 in the mean.
    assert difference.max() < 3e-4
    assert difference.mean() < 2e-5
    assert expected.std() > 0.5, "a flat distribution would compare nothing"
    request = make_request(prompt)
    node.generate([request], num_output)
    output = reference.greedy(prompt, num_output)
    assert request.output_token_ids == output
    assert len(set(output)) > num_output // 2, "nor would a sequence that repeats itself"
