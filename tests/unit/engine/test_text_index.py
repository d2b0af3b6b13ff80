"""`OwnText` and `OtherTexts`: what followed where a text read as its end does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve._native import OtherTexts, OwnText
from tests.matrix import examples

texts = st.lists(st.integers(0, 3), max_size=60)


@dataclass
class Text:
    """What an index reads of a request."""

    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)


LONG = 10**6


def index_of(text: list[int]) -> OwnText:
    """Of a long text a slice is added with each call."""
    index = OwnText()
    for _ in range(len(text) // 1000 + 1):
        index.propose(Text(text), 0)
    return index


@given(texts, st.integers(1, 8))
def test_a_proposal_is_how_the_longest_match_went_on(text: list[int], most: int) -> None:
    tokens, matched = OwnText().propose(Text(text), most)
    matches = [
        max(
            (n for n in range(min(place, 32) + 1) if text[place - n : place] == text[-n:]),
            default=0,
        )
        for place in range(1, len(text))
    ]
    longest = max([match for match in matches if match >= 3], default=0)
    if not longest:
        assert not tokens
        return
    assert 0 < len(tokens) <= most
    assert matched <= longest  # of a long chain only the newest places are looked at
    with_tokens = text + tokens
    places = [
        place for place in range(3, len(text)) if text[place - matched : place] == text[-matched:]
    ]
    assert any(with_tokens[place : place + len(tokens)] == tokens for place in places)


@settings(max_examples=examples(30))
@given(texts, st.lists(st.integers(1, 9), max_size=9))
def test_it_does_not_matter_how_the_text_came(text: list[int], sizes: list[int]) -> None:
    index, begin = OwnText(), 0
    num_prompt = sizes[0] if sizes else 0
    for size in [*sizes, len(text)]:
        begin += size
        index.propose(Text(text[:num_prompt], text[num_prompt:begin]), 3)
    assert len(index) == len(text)
    assert index.propose(Text(text), 5) == OwnText().propose(Text(text), 5)


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert OwnText().propose(Text([1, 2, 3], [1, 2, 3] * 3), 7) == ([1, 2, 3, 1, 2, 3, 1], 9)


def test_what_followed_most_often_is_proposed() -> None:
    text = [*[1, 2, 3, 7, 0], *[1, 2, 3, 8, 0] * 2, 5, 1, 2, 3]
    assert OwnText().propose(Text(text), 1) == ([8], 3)


def test_memory_is_a_few_bytes_a_token() -> None:
    index = index_of([i * i % 977 for i in range(100_000)])
    assert index.num_bytes < 32 * len(index)


def test_a_long_text_is_added_in_slices_and_drafts_come_behind_the_last() -> None:
    text = [i * i % 977 for i in range(10_000)]
    index, sizes = OwnText(), []
    while not index.propose(Text(text), 1)[0]:
        sizes.append(len(index))
        assert len(sizes) < 10
    assert sizes[0] < 3000
    assert len(index) == len(text)


@given(st.lists(texts, max_size=6), texts, st.integers(1, 8))
def test_other_texts_are_proposed_up_to_their_ends(
    others: list[list[int]], text: list[int], most: int
) -> None:
    index = OtherTexts(LONG)
    for other in others:
        index.add(other)
    tokens, matched = index.propose(Text(text), most)
    matches = [
        (n, other[place : place + most])
        for other in others
        for place in range(len(other))
        for n in range(3, min(place, 32) + 1)
        if text[-n:] == other[place - n : place]
    ]
    if not matches:
        assert (tokens, matched) == ([], 0)
    elif tokens:
        assert any(n == matched and found[: len(tokens)] == tokens for n, found in matches)
    else:
        assert matched == 0, "most texts end there"


@settings(max_examples=examples(30))
@given(st.integers(1, 900), st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_the_oldest_texts_are_written_over(most_tokens: int, sizes: list[int]) -> None:
    index, chosen, seen = OtherTexts(most_tokens), random.Random(5), 0
    added = [[chosen.randrange(10**6) for _ in range(size)] for size in sizes]
    for text in added:
        index.add(text)
    assert index.num_bytes <= 12 * max(256, 2 * most_tokens)
    for text in reversed(added):
        seen += len(text) + 1
        if len(text) > 3 and seen <= most_tokens:
            assert index.propose(Text(text[:3]), 4) == (text[3:7], 3)
    gone = sum(sizes) + len(sizes) - max(256, 2 * most_tokens)
    if len(added[0]) > 3 and gone >= len(added[0]):
        assert index.propose(Text(added[0][:3]), 4) == ([], 0)
