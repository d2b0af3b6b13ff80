"""Events that are written natively of a run: the same bytes as token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.answer.sse import TextTemplate
from coordinator.text import IncrementalDetokenizer
from pdserve._native import Histogram, TextStream, TokenRun, add_tokens
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


@dataclass
class Client:
    """What has been written to it, and how much of that waits."""

    seen: list[bytes] = field(default_factory=list)
    waits: int = 0
    is_gone: bool = False

    def is_closing(self) -> bool:
        return self.is_gone

    def get_write_buffer_size(self) -> int:
        return self.waits

    def write(self, data: bytes) -> None:
        self.seen.append(data)


def stream_of(
    detokenizer: IncrementalDetokenizer,
    client: Client,
    gaps: Histogram | None = None,
    *,
    most: int = MOST,
    most_bytes: int = 1 << 20,
    is_chunk: bool = False,
) -> TextStream:
    assert detokenizer.decoder is not None
    around = TEMPLATE.before, TEMPLATE.behind
    gaps = gaps or Histogram([])
    return TextStream(
        detokenizer.decoder, gaps, client, *around, is_chunk, most, most_bytes, last_s=1.5
    )


@settings(max_examples=examples(30))
@given(draw=st.data(), skip=st.booleans(), keeps=st.booleans())
def test_a_run_makes_the_events_of_its_tokens(draw: st.DataObject, skip: bool, keeps: bool) -> None:
    tokenizer = load("byte_level")
    ids = st.lists(st.integers(0, tokenizer.num_ids + 2), max_size=12)
    kept = frozenset(list(tokenizer.pieces.special_ids)[:1] if keeps else [])
    options = {"skip_special_tokens": skip, "kept_ids": kept}
    ours = IncrementalDetokenizer(tokenizer.pieces, **options)  # type: ignore[arg-type]
    theirs = IncrementalDetokenizer(tokenizer.pieces, **options)  # type: ignore[arg-type]
    client, request = Client(), Request()
    stream = stream_of(ours, client)
    for together in draw.draw(st.lists(ids, max_size=8)):
        text, before = "".join(map(theirs.push, together)), stream.written
        num_before = before.tokens, before.chars
        request.add(together, 2.0)
        if not stream.write(request.output):  # a token that is new, or may be kept
            shown = "".join(ours.push(i) for _, ids, _ in request.output.read() for i in ids)
            assert shown == text
        else:
            assert client.seen == ([TEMPLATE.filled(text)] if text else [])
            new = stream.written.tokens - num_before[0], stream.written.chars - num_before[1]
            assert new == (len(together), len(text))
        client.seen.clear()
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
    request, client = Request(), Client()
    request.add(ids)
    assert stream_of(detokenizer, client, most=len(ids)).write(request.output)
    assert client.seen == ([TEMPLATE.filled(tokenizer.decode(ids))] if ids else [])


def test_gaps_are_between_arrivals_and_what_is_too_much_is_left() -> None:
    tokenizer = load("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer.pieces)
    ids = tokenizer.encode("abcd", add_special_tokens=False)
    for token_id in ids:
        detokenizer.push(token_id)
    gaps, request, client = Histogram([0.1, 1.0]), Request(), Client()
    request.add(ids[:2], 2.0)
    request.add(ids[2:], 5.0)
    assert not stream_of(detokenizer, client, gaps, most=len(ids) - 1).write(request.output)
    stream = stream_of(detokenizer, client, gaps)
    assert stream.write(request.output)
    written = stream.written
    assert (written.tokens, written.chars, written.last_s, written.text_s) == (4, 4, 5.0, 5.0)
    assert (gaps.counts, gaps.sum) == ([2, 1, 1], 0.5 + 3.0)  # two came with others


def test_a_client_that_does_not_read_gets_nothing_at_once() -> None:
    tokenizer = load("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer.pieces)
    ids = tokenizer.encode("abcd", add_special_tokens=False)
    for token_id in ids:
        detokenizer.push(token_id)
    request, client = Request(), Client(waits=1000)
    request.add(ids)
    stream = stream_of(detokenizer, client, most_bytes=1000, is_chunk=True)
    assert not stream.write(request.output)
    client.waits, client.is_gone = 0, True
    assert not stream.write(request.output)
    client.is_gone = False
    assert stream.write(request.output)
    event = TEMPLATE.filled("abcd")
    assert client.seen == [b"%x\r\n%b\r\n" % (len(event), event)]


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
