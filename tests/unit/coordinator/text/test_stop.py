"""Stop strings: equal to a naive search of the full text, and never leaked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text import StopMatcher

ALPHABET = "ab<"
stops_of = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
pieces_of = st.lists(st.text(ALPHABET, max_size=6), max_size=12)


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Look at every beginning of the text, shortest first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(stops=stops_of, pieces=pieces_of, include_stop=st.booleans())
def test_equal_to_the_naive_search(stops: list[str], pieces: list[str], include_stop: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = "".join(matcher.push(piece) for piece in pieces)
    shown += matcher.finish()
    assert (shown, matcher.matched) == naive("".join(pieces), stops, include_stop)


@given(stops=stops_of, pieces=pieces_of)
def test_holds_back_only_a_beginning_of_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if matcher.matched is None:
            held = text.removeprefix(shown)
            assert held == "" or any(stop.startswith(held) for stop in stops)
            longest = max(
                (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])),
                default=0,
            )
            assert len(held) == longest


def test_a_stop_string_is_found_across_pieces() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(p) for p in ["one S", "T", "two ST", "OP three", "more"]] == [
        "one ",
        "",
        "STtwo ",
        "",
        "",
    ]
    assert matcher.matched == "STOP"
    assert matcher.finish() == ""


def test_the_stop_string_is_shown_if_asked_for() -> None:
    matcher = StopMatcher(["\n\n"], include_stop=True)
    assert [matcher.push(p) for p in ["a\n", "\nb"]] == ["a", "\n\n"]


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
