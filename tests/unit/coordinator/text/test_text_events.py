"""Events that are made natively of a run: the same bytes as token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.answer.sse import TextTemplate
from coordinator.text import IncrementalDetokenizer
from pdserve._native import Histogram, TextEvents, TokenRun, add_tokens
from tests.matrix import examples
from tests.unit.coordinator.text.test_detokenizer import load

TEMPLATE = TextTemplate(lambda text: b'data: {"text":' + msgspec.json.encode(text) + b"}\n\n")
MOST = 64


@dataclass
class Request:
    output: TokenRun = field(default_factory=TokenRun)

    def add(self, ids: list[int], now_s: float = 1.0) -> None:
        """Tokens that arrive together."""
        self.output.open(math.inf)
        first = len(self.output)
        for index, token_id in enumerate(ids, first):
            _, left, num_added = add_tokens({"r": self}, ["r"], [index], [token_id], now_s)
            assert (left, num_added) == ([], 1)


def events_of(detokenizer: IncrementalDetokenizer, gaps: Histogram) -> TextEvents:
    assert detokenizer.decoder is not None
    return TextEvents(detokenizer.decoder, gaps, TEMPLATE.before, TEMPLATE.behind)


@settings(max_examples=examples(30))
@given(draw=st.data(), skip=st.booleans(), keeps=st.booleans())
def test_a_run_makes_the_events_of_its_tokens(draw: st.DataObject, skip: bool, keeps: bool) -> None:
    tokenizer = load("byte_level")
    ids = st.lists(st.integers(0, tokenizer.num_ids + 2), max_size=12)
    kept = frozenset(list(tokenizer.pieces.special_ids)[:1] if keeps else [])
    options = {"skip_special_tokens": skip, "kept_ids": kept}
    ours = IncrementalDetokenizer(tokenizer.pieces, **options)  # type: ignore[arg-type]
    theirs = IncrementalDetokenizer(tokenizer.pieces, **options)  # type: ignore[arg-type]
    events, request = events_of(ours, Histogram([])), Request()
    for together in draw.draw(st.lists(ids, max_size=8)):
        text = "".join(map(theirs.push, together))
        request.add(together)
        read = events.next(request.output, MOST, 1.0)
        if read is None:  # a token that is new, or may be kept: it is read one by one
            shown = "".join(ours.push(i) for _, ids, _ in request.output.read() for i in ids)
            assert shown == text
        else:
            expected = TEMPLATE.filled(text) if text else None
            assert read == (expected, len(together), len(text), 1.0)
        assert request.output.read() == []
    assert ours.finish() == theirs.finish()


@settings(max_examples=examples(30))
@given(text=st.text(st.characters(codec="utf-8")))
def test_text_is_json_in_an_event(text: str) -> None:
    tokenizer = load("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer.pieces)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for token_id in ids:
        tokenizer.pieces.exact(token_id)
    request, gaps = Request(), Histogram([])
    request.add(ids)
    read = events_of(detokenizer, gaps).next(request.output, len(ids), 1.0)
    assert read is not None
    assert read[0] == (TEMPLATE.filled(tokenizer.decode(ids)) if ids else None)


def test_gaps_are_between_arrivals_and_what_is_too_much_is_left() -> None:
    tokenizer = load("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer.pieces)
    ids = tokenizer.encode("abcd", add_special_tokens=False)
    for token_id in ids:
        detokenizer.push(token_id)
    gaps, request = Histogram([0.1, 1.0]), Request()
    events = events_of(detokenizer, gaps)
    request.add(ids[:2], 2.0)
    request.add(ids[2:], 5.0)
    assert events.next(request.output, len(ids) - 1, 1.5) is None
    read = events.next(request.output, MOST, 1.5)
    assert read is not None
    assert read[1:] == (4, 4, 5.0)
    assert (gaps.counts, gaps.sum) == ([2, 1, 1], 0.5 + 3.0)  # two came with others


def test_a_run_takes_its_next_token_alone_while_it_is_open() -> None:
    request, row = Request(), (["r"], [0], [7])
    running = {"r": request}
    assert add_tokens(running, *row, 1.0) == ([], [0], 0)  # not open
    request.output.open(3.0)
    assert add_tokens(running, *row, 1.0) == ([request], [], 1)
    assert add_tokens(running, ["r", "gone", "r"], [1, 0, 3], [8, 0, 9], 2.0) == ([], [2], 1)
    assert add_tokens(running, ["r"], [2], [9], 3.0) == ([], [0], 0)  # no longer open
    assert request.output.read() == [(0, [7], 1.0), (1, [8], 2.0)]
    assert request.output.token_ids == [7, 8]
    request.output.extend([9])
    request.output.close()
    assert (request.output.read(), len(request.output)) == ([], 3)
