"""Reads a streamed completion: when each event arrived, and how the stream ended."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from itertools import takewhile

import aiohttp
import msgspec

from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.cluster.coordinator_http import END_MARK, events_in

SAID_CHARS = 120  # most characters that are kept of an error

_DIGEST_BYTES = 8  # of an answer
_MOST_CLOSING = 4  # most events at the end: last token, finish reason, count, end mark
_MOST_OPENING = 4  # events at the beginning that are looked at, as they may be no tokens


async def read_stream(stream: aiohttp.StreamReader, outcome: Outcome, start_s: float) -> None:
    """Record when each event arrives; contents are parsed, and hashed, at the end of the stream.

    The last events are the end mark and, with some servers, a finish reason and the token count, in
    one event or two. Every other event is one token, or several if the server is behind or batches
    them; the token count, if sent, gives the total. Where there are more events than tokens, those
    without text at the beginning are none, and no first token either.
    """
    first: list[bytes] = []
    everything: list[bytes] = []
    last: deque[bytes] = deque(maxlen=_MOST_CLOSING)
    async for events in events_in(stream.iter_any()):
        now_s = time.perf_counter() - start_s
        outcome.arrivals_s += [now_s] * len(events)
        first += events[: _MOST_OPENING - len(first)]
        everything += events
        last += events
        outcome.num_received = len(outcome.arrivals_s)
    if last and last[-1] == END_MARK:
        if len(last) == 1 or not error_in(last[-2]):
            _finish(outcome, first, last)
            _hash(outcome, everything)
            return
        last.pop()  # it only follows the error
        outcome.arrivals_s.pop()
        outcome.num_received -= 1
    error = error_in(last[-1]) if last else ""
    if error:  # instead of a token
        outcome.arrivals_s.pop()
        outcome.num_received -= 1
    outcome.end, outcome.error = "failed", f"the stream broke off: {error or 'without a word'}"


def _finish(outcome: Outcome, first: Sequence[bytes], last: deque[bytes]) -> None:
    """Remove the events at both ends that are not tokens, and count the tokens.

    One without text may be a token. By the server's count there are only so many of those.
    """
    arrivals_s, usage = outcome.arrivals_s, None
    last.pop()
    arrivals_s.pop()
    while last:
        event = _event_in(last[-1])
        usage = usage or event.usage
        if event.choices:
            break
        last.pop()
        arrivals_s.pop()
    num_tokens = 0 if usage is None else usage.completion_tokens
    while last and len(arrivals_s) > num_tokens and not _has_text(last.pop()):
        arrivals_s.pop()
    outcome.num_received = len(arrivals_s)
    if usage is not None:
        outcome.num_received = num_tokens
        outcome.num_prompt_counted = usage.prompt_tokens
        num_surplus = max(0, len(arrivals_s) - num_tokens)
        openings = takewhile(lambda event: not _has_text(event), first[:num_surplus])
        del arrivals_s[: sum(1 for _ in openings)]
    as_asked = outcome.num_received == outcome.num_output
    outcome.end = "finished" if as_asked else "failed"
    outcome.error = "" if as_asked else f"the stream had {outcome.num_received} tokens"


def _hash(outcome: Outcome, events: Sequence[bytes]) -> None:
    """Record which answer it was, and of what formats."""
    texts: dict[int, list[str]] = {}
    ids: dict[int, list[int]] = {}
    for event in map(_event_in, events):
        for choice in event.choices:
            texts.setdefault(choice.index, []).append(choice.text)
            ids.setdefault(choice.index, []).extend(choice.token_ids or [])
        outcome.format = outcome.format or event.system_fingerprint or ""
    said = [(index, "".join(texts[index]), ids[index]) for index in sorted(texts)]
    digest = hashlib.blake2b(msgspec.json.encode(said), digest_size=_DIGEST_BYTES)
    outcome.digest = digest.hexdigest()


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None  # of those who were asked for them, and have them


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    system_fingerprint: str | None = None


class _Error(msgspec.Struct):
    message: str
    code: str | int | None = None  # vLLM's is the status


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def _event_in(event: bytes) -> _Event:
    """Decode an event that may be a token; empty if it is something else."""
    try:
        return msgspec.json.decode(event, type=_Event)
    except msgspec.DecodeError:
        return _Event()


def _has_text(event: bytes) -> bool:
    return any(choice.text for choice in _event_in(event).choices)


def error_in(body: bytes) -> str:
    """Return the error's code, or its message if it has none; empty if there is no error."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return ""
    if error is None:
        return ""
    told = error.code if isinstance(error.code, str) and error.code else error.message
    return told[:SAID_CHARS]
