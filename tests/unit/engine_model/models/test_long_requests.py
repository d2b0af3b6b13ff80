"""Long requests and others, in one batch: each as transformers computes it, alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.request import Request
from tests.long_requests import LONG_ROPE, SHORT_LEN, with_one_rope
from tests.matrix import matrix
from tests.reference import Reference
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.ranks.ranked import ranked_node

NUM_OUTPUT = 12
# Long ones are so for their first tokens, too: the last has few when it is admitted for many.
REQUESTS = [(40, False), (300, True), (SHORT_LEN - NUM_OUTPUT, False), (40, True)]
NODES: dict[str, Callable[[Path], AbstractContextManager[Node]]] = {
    "native": lambda path: nullcontext(Node.load(path)),
    "torch": lambda path: nullcontext(Node.load(path, DecoderKind.TORCH)),
    "two ranks": lambda path: _ranked(path, Parallelism(tensor=2)),
    "two stages": lambda path: _ranked(path, Parallelism(pipeline=2)),
}


@contextmanager
def _ranked(path: Path, parallelism: Parallelism) -> Iterator[Node]:
    with ranked_node(path, parallelism) as (node, _):
        yield node


@pytest.fixture(scope="module")
def path(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("phi3", **LONG_ROPE)


@pytest.fixture(scope="module")
def references(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Reference]:
    folder = tmp_path_factory.mktemp("one_rope")
    return {
        is_long: Reference(with_one_rope(path, folder / factors, factors))
        for is_long, factors in ((False, "short"), (True, "long"))
    }


def requests() -> list[Request]:
    return [
        make_request(make_prompt(length, length), is_long=is_long) for length, is_long in REQUESTS
    ]


@pytest.mark.parametrize("which", matrix(NODES, 3))
def test_a_batch_of_both_has_the_tokens_of_each_alone(
    which: str, path: Path, references: dict[bool, Reference]
) -> None:
    batch = requests()
    with NODES[which](path) as node:
        node.generate(batch, NUM_OUTPUT, chunk=70)
    for request in batch:
        reference = references[request.prompt.is_long]
        expected = reference.greedy(request.prompt_token_ids, NUM_OUTPUT)
        assert request.output_token_ids == expected, request.num_prompt_tokens
        other = references[not request.prompt.is_long]
        assert other.greedy(request.prompt_token_ids, NUM_OUTPUT) != expected, "factors matter"


@pytest.mark.parametrize("is_long", [False, True])
def test_logits_are_those_of_transformers(
    is_long: bool, kind: DecoderKind, path: Path, references: dict[bool, Reference]
) -> None:
    """Those of a long one also if transformers chooses by itself."""
    prompt = make_prompt(300 if is_long else 200)
    found = Node.load(path, kind).logits(prompt, is_long=is_long)
    for reference in (references[is_long], Reference(path)):
        assert (found - reference.logits(prompt)).abs().max() < 3e-4


def test_bits_of_a_request_do_not_depend_on_its_neighbours(kind: DecoderKind, path: Path) -> None:
    """With equal tokens: KV, too."""
    node = Node.load(path, kind)

    def kv(request: Request) -> torch.Tensor:
        blocks = node.kv_cache.pool[request.block_table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return blocks[:, :, :, : request.num_computed_tokens].clone()

    together, alone = requests(), requests()
    node.generate(together, NUM_OUTPUT)
    for request, other in zip(together, alone, strict=True):
        node.generate([other], NUM_OUTPUT)
        if kind is DecoderKind.SERVED:
            assert torch.equal(kv(request), kv(other))
        else:
            torch.testing.assert_close(kv(request), kv(other), atol=1e-4, rtol=1e-4)
