"""Edits of logits are derived once per request, and then follow its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.request import Request
from pdserve.engine.row_edits import RowEdits
from pdserve.engine.sampling.adjust import edits_of
from pdserve.protocol import BadWord, SamplingParams
from tests.requests import make_request

EOS = frozenset({2})


def words(*token_ids: list[int]) -> list[BadWord]:
    return [BadWord(token_ids=ids) for ids in token_ids]


def shown(edits: RowEdits, request: Request) -> tuple[object, ...]:
    """All that an edit says, in any order of the tokens."""
    ids, amounts = edits.output
    return (
        sorted(edits.forbidden(request.output_token_ids).tolist()),
        dict(zip(edits.bias_ids.tolist(), edits.bias_amounts.tolist(), strict=True)),
        sorted(edits.seen.tolist()),
        dict(zip(ids.tolist(), amounts.tolist(), strict=True)),
    )


@given(
    st.lists(st.integers(0, 6), max_size=200),
    st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.just(1.5),
            "frequency_penalty": st.just(0.5),
            "presence_penalty": st.just(0.25),
            "min_tokens": st.integers(0, 5),
            "logit_bias": st.just({1: 1.0, 5: -1.0}),
            "bad_words": st.lists(
                st.builds(BadWord, token_ids=st.lists(st.integers(0, 6), min_size=1, max_size=4)),
                max_size=6,
            ),
        },
    ),
)
def test_edits_that_follow_are_those_made_anew(output: list[int], params: dict[str, Any]) -> None:
    """Token by token, or all at once as on the node that takes over: the same edits."""
    request = make_request([3, 3, 4], [], **params)
    for token_id in output:
        followed = edits_of(request, EOS)
        request.output_token_ids.append(token_id)
    followed = edits_of(request, EOS)
    anew = edits_of(make_request([3, 3, 4], output, **params), EOS)
    assert shown(followed, request) == shown(anew, request)


def test_bad_words_are_found_at_the_end_of_the_output() -> None:
    bad = words([9], [1, 5], [2, 1, 6], [1, 1, 7], [2, 1, 8])
    edits = RowEdits(SamplingParams(bad_words=bad), [2, 1], frozenset())
    found = {
        tuple(output): set(edits.forbidden(output).tolist())
        for output in ([], [1], [2, 1], [1, 1], [1, 2], [2, 1, 1])
    }
    assert found == {
        (): {9},
        (1,): {9, 5},
        (2, 1): {9, 5, 6, 8},
        (1, 1): {9, 5, 7},
        (1, 2): {9},
        (2, 1, 1): {9, 5, 7},
    }


class CountedTokens(list[int]):
    """Token ids that count how many of them are read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}])
def test_a_step_reads_its_new_token_and_not_the_history(params: dict[str, Any]) -> None:
    sampling = SamplingParams(**params, bad_words=words([1, 2], [3] * 20))
    prompt, output = CountedTokens(range(5000)), CountedTokens(range(5000))
    edits = RowEdits(sampling, prompt, EOS)
    edits.follow(output)
    prompt.num_read = output.num_read = 0
    for token_id in range(10):
        output.append(token_id)
        edits.follow(output)
        edits.forbidden(output)
    assert prompt.num_read == 0
    assert output.num_read <= 10 * 3, "the new token, and twice the end of the output"
