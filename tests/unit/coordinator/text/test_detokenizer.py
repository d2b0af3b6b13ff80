"""Incremental detokenisation: the pieces add up to the decoding of the whole."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text import IncrementalDetokenizer, Tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.text import made_tokenizers as made

FAMILIES: dict[str, Callable[[], str]] = {
    "byte_level": made.byte_level_json,
    "llama_2": made.byte_fallback_json,
    "gemma": lambda: made.byte_fallback_json(strip=False),
    "metaspace": made.metaspace_json,
    "word_piece": made.word_piece_json,
    "word_end": made.word_end_json,
}
TEXTS = ["Hello world", " leading", "a  b", "你好 😀 ok", "café ü\n", "👩‍👩‍👧x", "the <think> a b"]


@cache
def load(family: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(FAMILIES[family]()))


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer.pieces, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def whole(family: str, ids: list[int], *, skip: bool = True) -> str:
    """The decoding of the whole, but of an invalid byte-fallback run only the invalid bytes."""
    tokenizer = load(family)
    if family not in ("llama_2", "gemma"):
        return tokenizer.decode(ids, skip_special_tokens=skip)
    kept = [i for i in ids if not (skip and tokenizer.is_special(i))]
    raw = b"".join(tokenizer.pieces.exact(i) or _ordinary(tokenizer, i) for i in kept)
    text = raw.decode("utf-8", errors="replace")
    return text.removeprefix(" ") if family == "llama_2" else text


def _ordinary(tokenizer: Tokenizer, token_id: int) -> bytes:
    token = tokenizer._backend.id_to_token(token_id)
    assert token is not None
    return token.replace("▁", " ").encode()


@pytest.mark.parametrize("family", matrix(FAMILIES, 3))
@given(draw=st.data(), skip=st.booleans())
def test_random_tokens_add_up(family: str, draw: st.DataObject, skip: bool) -> None:
    tokenizer = load(family)
    ids = draw.draw(st.lists(st.integers(0, tokenizer.num_ids - 1), max_size=30))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == whole(family, ids, skip=skip)


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "gemma"])
@given(text=st.text(max_size=30))
def test_encoded_texts_add_up_to_the_plain_decoding(family: str, text: str) -> None:
    tokenizer = load(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_half_a_character(family: str, text: str) -> None:
    tokenizer = load(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, ids)
    assert "�" not in "".join(shown)
    assert "".join(shown) == tokenizer.decode(ids)
    assert shown[-1] == ""


def test_a_character_shows_with_its_last_byte() -> None:
    tokenizer = load("llama_2")
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    assert pieces(tokenizer, ids) == ["a", "", "", "", "😀", ""]


def test_an_unfinished_character_shows_at_the_end() -> None:
    tokenizer = load("byte_level")
    ids = tokenizer.encode("a🦊", add_special_tokens=False)[:-1]
    shown = pieces(tokenizer, ids)
    assert "".join(shown[:-1]) == "a"
    assert shown[-1] == "�"


def test_special_tokens_between_words_keep_the_space() -> None:
    tokenizer = load("llama_2")
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("a", "b")]
    assert "".join(pieces(tokenizer, [*words[0], 2, *words[1]])) == "a b"


def test_tokens_beyond_the_vocabulary_show_nothing() -> None:
    tokenizer = load("byte_level")
    assert pieces(tokenizer, [10**6]) == ["", ""]


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "metaspace"])
def test_state_does_not_grow_with_the_text(family: str) -> None:
    tokenizer = load(family)
    detokenizer = IncrementalDetokenizer(tokenizer.pieces)
    ids = [i for i in range(tokenizer.num_ids) if not tokenizer.is_special(i)]
    for token_id in ids:  # fills the table of pieces
        detokenizer.push(token_id)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for token_id in ids * 5:
        detokenizer.push(token_id)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2000


def test_shown_bytes_keep_the_leading_space() -> None:
    for family, word in (("llama_2", "▁a"), ("byte_level", "Ġa"), ("metaspace", "▁a")):
        tokenizer = load(family)
        token_id = tokenizer._backend.token_to_id(word)
        assert token_id is not None
        assert tokenizer.pieces.shown(token_id) == b" a"
    tokenizer = load("llama_2")
    assert tokenizer.pieces.shown(tokenizer._backend.token_to_id("<0xF0>") or 0) == b"\xf0"
    assert re.fullmatch(rb"</s>", tokenizer.pieces.shown(2))
