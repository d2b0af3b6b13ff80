"""aLoRA: where it begins in a prompt, and whose KV is before that."""

from __future__ import annotations

from itertools import pairwise

import pytest

from coordinator.adapters.known import Version, last_place
from pdserve.protocol import Prompt
from pdserve.shared.errors import InvalidRequest

SIZE = 4
TOKENS = list(range(100, 123))  # five full blocks
DIGEST, OTHER = "a" * 32, "b" * 32


def hashes(adapter: str, adapted_from: int, tokens: list[int] = TOKENS) -> list[bytes]:
    return Prompt(tokens, "salt", adapter=adapter, adapted_from=adapted_from).hashes(SIZE)


@pytest.mark.parametrize("begin", range(1, len(TOKENS)))
def test_blocks_before_it_are_the_models_and_all_others_its_own(begin: int) -> None:
    base, own = hashes("", 0), hashes(DIGEST, begin)
    num_shared = begin // SIZE
    assert own[:num_shared] == base[:num_shared]
    others = [base, hashes(OTHER, begin), hashes(DIGEST, 0), hashes(DIGEST, begin + 1)]
    for other in others:
        assert set(own[num_shared:]).isdisjoint(other[num_shared:] if other is not base else base)


def test_hashes_may_be_extended_block_by_block() -> None:
    for begin in range(len(TOKENS)):
        prompt, found = Prompt(TOKENS, adapter=DIGEST, adapted_from=begin), []
        for end in range(len(TOKENS) + 1):
            prompt.extend_hashes(found, lambda first, end: TOKENS[first:end], end, SIZE)
            assert found == prompt.hashes(SIZE)[: end // SIZE], (begin, end)


def test_beginnings_tell_it_from_the_model_once_it_has_begun() -> None:
    base = Prompt(TOKENS)
    early, late, all_of_it = (Prompt(TOKENS, "", False, DIGEST, n) for n in (3, 9, 0))
    assert early.beginning(3) == base.beginning(3)
    apart = {prompt.beginning(12) for prompt in (base, early, late, all_of_it)}
    assert len(apart) == 4


def test_it_begins_where_its_invocation_stands_for_the_last_time() -> None:
    assert last_place([], [1, 2]) == 0
    assert last_place([7, 8], [7, 8, 1, 7, 8, 2, 7]) == 3
    assert last_place([7, 7], [1, 7, 7, 7]) == 2
    assert last_place([7, 8], [7, 8]) == 0
    assert last_place([7, 8], [8, 7]) is None
    assert last_place([7, 8], [7]) is None


def test_a_prompt_without_an_invocation_is_refused_and_not_answered_by_the_model() -> None:
    version = Version("x", "/x", DIGEST, 1, "", 0, (7, 8))
    adapted = version.adapt(Prompt([1, 7, 8, 2]))
    assert (adapted.adapter, adapted.adapted_from) == (DIGEST, 1)
    with pytest.raises(InvalidRequest, match=r"begins at its invocation, the tokens \[7, 8\]"):
        version.adapt(Prompt([1, 7, 2, 8]))
    assert Version("x", "/x", DIGEST, 1, "", 0).adapt(Prompt([1])).adapted_from == 0


def test_blocks_of_it_are_a_chain() -> None:
    """Each depends on the one before, also where it begins at the start of a block."""
    changed = [*TOKENS]
    changed[0] += 1
    for begin in (1, SIZE, SIZE + 1):
        assert set(hashes(DIGEST, begin)).isdisjoint(hashes(DIGEST, begin, changed))
    assert all(one != other for one, other in pairwise(hashes(DIGEST, SIZE)))
