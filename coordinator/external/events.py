"""What a server elsewhere says, checked before any of it goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec
from aiohttp import StreamReader
from aiohttp.http_exceptions import LineTooLong

from coordinator.external.errors import EndpointFailed

MOST_EVENT_BYTES: Final = 2**22
_DONE: Final = b"[DONE]"
_OTHER_FIELDS: Final = (b":", b"event:", b"id:", b"retry:")  # of server-sent events; no data


class Malformed(EndpointFailed):
    """It does not speak OpenAI's API."""


def decoded(text: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises Malformed."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        shown = text[:80].decode("utf-8", "replace")
        raise Malformed(f"it sent {shown!r}, which is no JSON object") from error


async def events_of(content: StreamReader) -> AsyncIterator[dict[str, Any] | None]:
    """Yield each event of a stream, and None for a sign of life, until [DONE] or no more comes.

    Raises Malformed.
    """
    data: list[bytes] = []
    num_bytes = 0
    while line := await _line(content):
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
            num_bytes += len(line)
        elif line.startswith(_OTHER_FIELDS):
            yield None
        elif line:
            shown = line[:80].decode("utf-8", "replace")
            raise Malformed(f"it sent {shown!r}, which is no server-sent event")
        elif data:
            text = b"\n".join(data)
            if text == _DONE:
                return
            yield decoded(text)
            data, num_bytes = [], 0
        if num_bytes > MOST_EVENT_BYTES:
            raise Malformed(f"it sent an event of more than {MOST_EVENT_BYTES} bytes")


async def _line(content: StreamReader) -> bytes:
    try:
        return await content.readline()
    except (ValueError, LineTooLong) as error:  # longer than the reader's limit
        raise Malformed("it sent a line that is too long for an event") from error


class OtherModel(EndpointFailed):
    """It answers as another model than was asked for."""


class Counts(msgspec.Struct):
    """Tokens of an answer."""

    prompt: int
    cached: int
    completion: int


class AnswerCheck:
    """Looks at one answer, whole or in events: whose it is, and whether all of it is there."""

    def __init__(self, answers_as: str, num_choices: int) -> None:
        """`answers_as`: a pattern of the names that its model may have."""
        self._answers_as = answers_as
        self._unfinished = set(range(num_choices))
        self.counts: Counts | None = None  # of its tokens, once it has said them

    def end(self) -> None:
        """Check that nothing is missing. Raises EndpointFailed."""
        if self._unfinished:
            raise EndpointFailed("its answer was cut off before its end")

    def look(self, said: dict[str, Any]) -> None:
        """Check an answer, or an event of one. Raises EndpointFailed."""
        if (error := said.get("error")) is not None:
            raise EndpointFailed(f"it ended with the error {message_in({'error': error})!r}")
        model, choices = said.get("model"), said.get("choices")
        if not isinstance(model, str) or not isinstance(choices, list):
            raise Malformed("it sent an answer without 'model' and 'choices'")
        if not fnmatchcase(model, self._answers_as):
            raise OtherModel(
                f"it answered as the model {model[:80]!r}, not as {self._answers_as!r} "
                "(set answers_as if that is right)"
            )
        for choice in choices:
            if not _is_choice(choice):
                raise Malformed("it sent a choice without an index, or without content")
            index = choice["index"]
            if choice.get("finish_reason") is not None:
                self._unfinished.discard(index)
        self.counts = _counts_in(said) or self.counts


def _is_choice(choice: Any) -> bool:
    if not isinstance(choice, dict) or not isinstance(choice.get("index"), int):
        return False
    return content_of(choice) is not None or isinstance(choice.get("text"), str)


def content_of(choice: dict[str, Any]) -> dict[str, Any] | None:
    """Return the delta or the message of a choice; None: it has neither, but perhaps `text`."""
    found = (choice.get(name) for name in ("delta", "message"))
    return next((said for said in found if isinstance(said, dict)), None)


def message_in(said: dict[str, Any]) -> str:
    """Return the message of an error body, of which there are several forms."""
    error = said.get("error", said)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or said)[:300]


def _counts_in(said: dict[str, Any]) -> Counts | None:
    """Return the token counts that an answer, or an event, has. Raises Malformed."""
    usage = said.get("usage")
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    try:
        found = {
            "prompt": usage["prompt_tokens"],
            "completion": usage["completion_tokens"],
            "cached": (details or {}).get("cached_tokens") or 0,
        }
        counts = msgspec.convert(found, Counts)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise Malformed("it sent a 'usage' without token counts") from error
    if min(counts.prompt - counts.cached, counts.cached, counts.completion) < 0:
        raise Malformed("it sent a 'usage' with impossible token counts")
    return counts
