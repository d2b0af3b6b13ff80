"""`TextIndex`: what followed where a text read as its end does."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve._native import TextIndex

texts = st.lists(st.integers(0, 3), max_size=60)


@dataclass
class Text:
    """What an index reads of a request."""

    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)


def index_of(text: list[int]) -> TextIndex:
    index = TextIndex()
    index.propose(Text(text), 0)
    return index


@given(texts, st.integers(1, 8))
def test_a_proposal_is_how_the_longest_match_went_on(text: list[int], most: int) -> None:
    tokens, matched = TextIndex().propose(Text(text), most)
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


@settings(max_examples=30)
@given(texts, st.lists(st.integers(1, 9), max_size=9))
def test_it_does_not_matter_how_the_text_came(text: list[int], sizes: list[int]) -> None:
    index, begin = TextIndex(), 0
    num_prompt = sizes[0] if sizes else 0
    for size in [*sizes, len(text)]:
        begin += size
        index.propose(Text(text[:num_prompt], text[num_prompt:begin]), 3)
    assert len(index) == len(text)
    assert index.propose(Text(text), 5) == TextIndex().propose(Text(text), 5)


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert TextIndex().propose(Text([1, 2, 3], [1, 2, 3] * 3), 7) == ([1, 2, 3, 1, 2, 3, 1], 9)


def test_what_followed_most_often_is_proposed() -> None:
    text = [*[1, 2, 3, 7, 0], *[1, 2, 3, 8, 0] * 2, 5, 1, 2, 3]
    assert TextIndex().propose(Text(text), 1) == ([8], 3)


def test_memory_is_a_few_bytes_a_token() -> None:
    index = index_of([i * i % 977 for i in range(100_000)])
    assert index.num_bytes < 32 * len(index)
