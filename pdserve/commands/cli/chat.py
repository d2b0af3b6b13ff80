"""Sends one streamed request over plain HTTP, and times its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve.commands.cluster.coordinator_http import END_MARK, events_in, key_headers
from pdserve.shared.errors import ClusterError, from_code


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None  # of chats
    text: str = ""  # of completions
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


@dataclass(frozen=True)
class Answer:
    """A complete answer, with latencies as seen by the client."""

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    prefill_node: str
    decode_node: str

    @property
    def tpot_s(self) -> float | None:
        """(e2e - TTFT) / (output tokens - 1); None when there was only one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


async def ask(
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    on_text: Callable[[str], None],
    is_chat: bool = True,
) -> Answer:
    """Send one prompt with greedy sampling; `on_text` is called with the text as it arrives.

    Without `is_chat`, the prompt is a text to go on with.

    Raises:
        PdserveError: an error in the stream, as the server reported it.
        ClusterError: refused, broken off, or not the answer of an OpenAI-compatible server.
    """
    body: dict[str, object] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    reading = _Reading(on_text)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url + path, json=body, headers=key_headers()) as response,
        ):
            if response.status != 200:
                content = await response.text()
                raise ClusterError(f"the request was refused with {response.status}: {content}")
            async for events in events_in(response.content.iter_any()):
                for event in events:
                    reading.take(event)
    except aiohttp.ClientError as error:
        raise ClusterError(f"the connection to {url} broke: {error}") from error
    return reading.answer(
        response.headers.get("x-pdserve-prefill-node", "?"),
        response.headers.get("x-pdserve-decode-node", "?"),
    )


class _Reading:
    """Parses the events of a stream, and collects the answer."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._parts: list[str] = []
        self._finish_reason: str | None = None
        self._usage: _Usage | None = None
        self._is_complete = False

    def take(self, event: bytes) -> None:
        """Parse one event of the stream."""
        if event == END_MARK:
            self._is_complete = True
            return
        try:
            chunk = msgspec.json.decode(event, type=_Chunk)
        except msgspec.DecodeError as error:
            raise ClusterError(f"not a chunk of a completion: {event!r}: {error}") from error
        if chunk.error is not None:
            raise from_code(chunk.error.code or "internal_error", chunk.error.message)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._take_choice(choice)

    def _take_choice(self, choice: _Choice) -> None:
        self._finish_reason = choice.finish_reason or self._finish_reason
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            self._last_s = time.perf_counter()
            self._first_s = self._first_s or self._last_s
            self._parts.append(text)
            self._on_text(text)

    def answer(self, prefill_node: str, decode_node: str) -> Answer:
        """The complete answer, at the end of the stream."""
        if not self._is_complete or self._finish_reason is None or self._usage is None:
            raise ClusterError("the answer broke off before its end")
        if self._first_s is None:
            raise ClusterError("the answer is empty")
        return Answer(
            text="".join(self._parts),
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.prompt_tokens,
            output_tokens=self._usage.completion_tokens,
            ttft_s=self._first_s - self._start_s,
            e2e_s=self._last_s - self._start_s,
            prefill_node=prefill_node,
            decode_node=decode_node,
        )
