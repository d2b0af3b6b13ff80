"""A client: makes a call, hears its answer, and comes back under its key if the answer breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import Final

import aiohttp
import msgspec

from pdserve.commands.bench.chaos.calls import Body, ChaosCall

DEADLINE_S: Final = 120.0  # for a call to end in any way
NO_END: Final = "no end"
_COMES_BACK_S: Final = 0.1  # after its connection broke, or was refused
_BEHIND: Final = "idempotency_key_in_use"  # its former connection is not known to be gone yet
_UNAVAILABLE: Final = 503
_OVERLOADED: Final = 529  # which the Messages API says instead
_LOGPROBS: Final = 1000  # a choice's log-probabilities are compared like another choice


class HeardStream(msgspec.Struct):
    """What a client heard of one call."""

    kind: str
    number: int
    began_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    answers: dict[int, str] = {}  # by choice: everything that must be the same again, as text
    finish_reasons: dict[int, list[str]] = {}  # by choice; exactly one each
    completion_tokens: int | None = None
    num_guessed: int = 0  # of these
    num_ends: int = 0  # events that end the whole answer
    error: str = ""  # its code, or what broke
    is_broken: bool = False  # no error was heard: the connection ended before the answer
    is_keyed: bool = False
    last_id: str = ""  # of the last event that was heard whole
    response_id: str = ""  # of a response that is made in the background
    num_returns: int = 0
    has_left: bool = False
    heard_s: list[float] = []  # when something came

    def add(self, index: int, text: str) -> None:
        """Add a piece of a choice."""
        self.answers[index] = self.answers.get(index, "") + text


async def perform(session: aiohttp.ClientSession, url: str, call: ChaosCall) -> HeardStream:
    """Make a call, and hear its answer to the end, or until the client leaves."""
    heard = HeardStream(
        kind=call.kind, number=call.number, is_keyed=bool(call.key), began_s=monotonic()
    )
    try:
        async with asyncio.timeout(call.leaves_after_s or DEADLINE_S):
            is_heard = await _is_heard(session, url, call, heard)
            while not is_heard:
                await asyncio.sleep(_COMES_BACK_S)
                is_heard = await _is_heard(session, url, call, heard)
    except TimeoutError:
        heard.has_left = call.leaves_after_s > 0
        heard.error = "" if heard.has_left else NO_END
    heard.ended_s = monotonic()
    return heard


async def _is_heard(
    session: aiohttp.ClientSession, url: str, call: ChaosCall, heard: HeardStream
) -> bool:
    """Hear what is still missing; returns False if it broke, and the client should come back."""
    heard.error, heard.is_broken = "", False
    try:
        async with _asked(session, url + call.path, call, heard) as response:
            is_busy = response.status == _OVERLOADED
            heard.status = _UNAVAILABLE if is_busy else response.status
            if response.status == 200 and call.is_in_background:
                return _is_made(heard, await response.read())
            if response.status != 200 or not call.is_streamed:
                _take_whole(heard, await response.read())
            else:
                await _take_events(heard, response)
    except aiohttp.ClientError as error:
        heard.error, heard.is_broken = type(error).__name__, True
        heard.num_returns += 1
        return not (call.key or heard.response_id)
    if heard.status == _UNAVAILABLE and (call.is_in_background or heard.num_returns > 0):
        return not (call.key or heard.response_id)  # nothing could be stored, or nobody served
    return not (call.key and heard.error.startswith(_BEHIND))


def _asked(
    session: aiohttp.ClientSession, url: str, call: ChaosCall, heard: HeardStream
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Make the call, or ask for what is made in the background."""
    if heard.response_id:
        return session.get(f"{url}/{heard.response_id}")
    return session.post(url, json=call.body, headers=_headers(call, heard))


def _is_made(heard: HeardStream, content: bytes) -> bool:
    """Return whether a response that is made in the background has ended, and take it then."""
    body = msgspec.json.decode(content)
    heard.response_id = body["id"]
    if body["status"] in ("queued", "in_progress"):
        return False
    heard.heard_s.append(monotonic())
    for item in body["output"]:
        for part in item.get("content") or ():
            heard.add(0, part.get("text", ""))
    _take_event(heard, {"type": f"response.{body['status']}", "response": body})
    return True


def _headers(call: ChaosCall, heard: HeardStream) -> Mapping[str, str]:
    """Who comes back says how much it has: of an answer in one piece, nothing."""
    if not call.key:
        return {}
    back = {"Last-Event-ID": heard.last_id or "0"} if heard.num_returns else {}
    return {"Idempotency-Key": call.key, **back}


async def _take_events(heard: HeardStream, response: aiohttp.ClientResponse) -> None:
    event_id = ""
    async for line in response.content:
        if line.startswith(b"id:"):
            event_id = line[3:].strip().decode()
        if not line.startswith(b"data:"):
            continue
        heard.heard_s.append(monotonic())
        data = line[5:].strip()
        if data == b"[DONE]":
            heard.num_ends += 1
            continue
        body = msgspec.json.decode(data)
        if body.get("error"):
            heard.error = _words(body["error"])
        elif "choices" in body:
            _take_choices(heard, body, "delta")
        else:
            _take_event(heard, body)
        heard.last_id = event_id


def _take_whole(heard: HeardStream, content: bytes) -> None:
    heard.heard_s.append(monotonic())
    body = msgspec.json.decode(content) if content else {}
    if heard.status != 200:
        heard.error = _words(body.get("error"))
        return
    _take_choices(heard, body, "message")
    heard.num_ends = 1 if body.get("choices") else 0


def _take_choices(heard: HeardStream, body: Body, part: str) -> None:
    for choice in body["choices"]:
        said = choice.get(part) or {}
        text = choice.get("text") or said.get("content") or ""
        for tool in said.get("tool_calls") or ():
            text += tool["function"].get("name", "") + tool["function"].get("arguments", "")
        for token in (choice.get("logprobs") or {}).get("content") or ():
            heard.add(_LOGPROBS + choice["index"], repr(token))
        heard.add(choice["index"], text)
        if choice.get("finish_reason"):
            heard.finish_reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    if body.get("usage"):
        heard.completion_tokens = body["usage"]["completion_tokens"]
        details = body["usage"].get("completion_tokens_details") or {}
        heard.num_guessed = details.get("accepted_prediction_tokens", 0)


def _take_event(heard: HeardStream, body: Body) -> None:
    kind = body.get("type", "")
    if kind == "response.output_text.delta":
        heard.add(0, body["delta"])
    elif kind == "content_block_delta":
        heard.add(0, body["delta"].get("text", ""))
    elif kind == "message_delta":
        heard.finish_reasons.setdefault(0, []).append(body["delta"]["stop_reason"])
        heard.completion_tokens = body["usage"]["output_tokens"]
    elif kind == "message_stop":
        heard.num_ends += 1
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        heard.num_ends += 1
        answer = body["response"]
        heard.finish_reasons.setdefault(0, []).append(kind)
        if answer.get("usage"):
            heard.completion_tokens = answer["usage"]["output_tokens"]
        if kind == "response.failed":
            heard.error = _words(answer.get("error"))
    elif kind == "error":
        heard.error = _words(body)


def _words(error: Body | None) -> str:
    if not error:
        return "an error without words"
    code = error.get("code") or (error.get("details") or {}).get("error_code")  # Messages have that
    return f"{code}: {error.get('message')}"
