"""A client of /v1/completions that speaks token ids: exact where text would hide a difference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from tokenizers import pre_tokenizers

from tests.cluster.prompts import EOS_TOKEN, EOS_TOKEN_ID

MODEL = "tiny"
DEADLINE_S = 60.0  # of a whole request, so that a hang is an error and not the end of the day


@dataclass
class Output:
    """What came of one request, complete or not."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_decode_precision_tokens: int = 0
    prefill_node: str | None = None
    decode_node: str | None = None
    status: int = 0
    error: dict[str, Any] | None = None  # the OpenAI error object
    retry_after: str | None = None
    is_done: bool = False  # the whole body has come; of a stream: [DONE]
    is_broken: bool = False  # the connection broke first

    @property
    def tokens(self) -> list[int]:
        """The token ids of a request that went well."""
        assert self.error is None, self.error
        assert self.is_done
        num_hidden = 1 if self.finish_reason == "stop" else 0  # the token that ended it
        assert self.num_completion_tokens == len(self.token_ids) + num_hidden
        return self.token_ids


class Client:
    """Requests to one coordinator. Use as a context."""

    def __init__(self, url: str, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s`: of each request."""
        self.url = url
        self._deadline_s = deadline_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._deadline_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(self, prompt: list[int], max_tokens: int, **fields: Any) -> Output:
        """One request, answered in one piece. Errors are in the output."""
        async with self._post(prompt, max_tokens, fields) as response:
            body = await response.json()
            output = _begin(response)
            output.error = body.get("error")
            if output.error is None:
                _take(output, body)
            output.is_done = True
            return output

    async def answers(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[Output]:
        """As `complete`, of a request with several answers: one output each."""
        async with self._post(prompt, max_tokens, fields) as response:
            body = await response.json()
            outputs = []
            for choice in body["choices"]:
                output = _begin(response)
                _take(output, {"choices": [choice]})
                outputs.append(output)
            outputs[0].num_cached_tokens = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            outputs[0].num_completion_tokens = body["usage"]["completion_tokens"]
            return outputs

    @asynccontextmanager
    async def stream(
        self, prompt: list[int], max_tokens: int, **fields: Any
    ) -> AsyncIterator[Stream]:
        """One streamed request; leaving the context before its end hangs up on the server."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._post(prompt, max_tokens, options | fields) as response:
            yield Stream(response)

    async def stream_all(self, prompt: list[int], max_tokens: int, **fields: Any) -> Output:
        """One streamed request, read to its end."""
        async with self.stream(prompt, max_tokens, **fields) as stream:
            return await stream.rest()

    def _post(self, prompt: list[int], max_tokens: int, fields: dict[str, Any]) -> Any:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        return self._session.post(f"{self.url}/v1/completions", json=body | fields)


class Follower:
    """A streamed request that is read in the background, whatever becomes of it."""

    def __init__(self, client: Client, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        self.output = Output()
        self._progress = asyncio.Event()
        self._task = asyncio.create_task(self._follow(client, prompt, max_tokens, fields))

    async def reached(self, num_tokens: int) -> Output:
        """Wait until so many tokens are there; fails when the stream ends before."""
        while len(self.output.token_ids) < num_tokens:
            assert not self._task.done(), f"ended before: {self.output}"
            self._progress.clear()
            waits = [asyncio.create_task(self._progress.wait()), self._task]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            waits[0].cancel()
        return self.output

    async def end(self, within_s: float = DEADLINE_S) -> Output:
        """Wait for the stream's end, good or bad; a TimeoutError when there is none in time."""
        async with asyncio.timeout(within_s):
            await asyncio.shield(self._task)
        return self.output

    async def hang_up(self) -> None:
        """Close the connection, wherever the request is."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(
        self, client: Client, prompt: list[int], max_tokens: int, fields: dict[str, Any]
    ) -> None:
        try:
            async with client.stream(prompt, max_tokens, **fields) as stream:
                self.output = stream.output
                while await stream.read_line():
                    self._progress.set()
        except aiohttp.ClientError:
            self.output.is_broken = True


class Stream:
    """A response that is being streamed."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.output = _begin(response)

    async def read(self, num_tokens: int) -> Output:
        """Read on until there are so many tokens, or the stream ends."""
        while len(self.output.token_ids) < num_tokens and not self.output.is_done:
            if not await self.read_line():
                break
        return self.output

    async def rest(self) -> Output:
        """Read to the end."""
        while not self.output.is_done and await self.read_line():
            pass
        return self.output

    async def read_line(self) -> bool:
        """Take one line in; False: there is none any more."""
        line = await self._response.content.readline()
        if self._response.content_type == "application/json":  # refused before the first event
            self.output.error = json.loads(line)["error"]
            self.output.is_done = True
            return False
        if line.startswith(b"data: [DONE]"):
            self.output.is_done = True
        elif line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                self.output.error = event["error"]
            else:
                _take(self.output, event)
        return bool(line)


def _begin(response: aiohttp.ClientResponse) -> Output:
    return Output(
        status=response.status,
        prefill_node=response.headers.get("x-pdserve-prefill-node"),
        decode_node=response.headers.get("x-pdserve-decode-node"),
        retry_after=response.headers.get("Retry-After"),
    )


def _take(output: Output, body: dict[str, Any]) -> None:
    if usage := body.get("usage"):
        output.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        output.num_completion_tokens = usage["completion_tokens"]
        details = usage["prompt_tokens_details"]
        output.num_decode_precision_tokens = details.get("decode_precision_tokens", 0)
    for choice in body["choices"]:
        output.text += choice["text"]
        output.finish_reason = choice["finish_reason"] or output.finish_reason
        if logprobs := choice["logprobs"]:
            output.token_ids += [_IDS[token] for token in logprobs["tokens"]]
            output.logprobs += logprobs["token_logprobs"]


def _ids() -> dict[str, int]:
    """What the API calls a token |-> its id in the tokenizer of `tests.checkpoints`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {char: byte for byte, char in _byte_level().items()}
    ids = {_shown(bytes([byte_of[char]])): i for i, char in enumerate(alphabet)}
    return ids | {EOS_TOKEN: EOS_TOKEN_ID}


def _byte_level() -> dict[int, str]:
    """GPT-2's way to write a byte as a visible character: byte |-> character."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def _shown(byte: bytes) -> str:
    return byte.decode() if byte[0] < 128 else f"bytes:\\x{byte[0]:02x}"


_IDS = _ids()


class EventStream:
    """A stream of events under a key, with what a client needs to come back to it."""

    def __init__(self, url: str, key: str, last_id: str | None = None, **fields: Any) -> None:
        self.events: list[dict[str, Any]] = []  # without the time of their creation
        self.last_id = ""
        self.is_done = False
        self._url = url
        self._headers = {"Idempotency-Key": key}
        if last_id is not None:
            self._headers["Last-Event-ID"] = last_id
        self._body = {"model": MODEL, "stream": True, "ignore_eos": True}
        self._body |= {"return_token_ids": True} | fields

    async def read(self, num_events: int, then: Callable[[], None] = lambda: None) -> None:
        """Read to its end, or until it breaks; call `then` when there are so many events."""
        async with aiohttp.ClientSession() as session:
            path = f"{self._url}/v1/completions"
            async with session.post(path, json=self._body, headers=self._headers) as response:
                assert response.status == 200, await response.text()
                try:
                    while line := await response.content.readline():
                        if self._take(line) and len(self.events) == num_events:
                            then()
                except aiohttp.ClientError:
                    assert not self.is_done

    @property
    def token_ids(self) -> list[int]:
        """What all events have told."""
        return [i for event in self.events for i in event["choices"][0]["token_ids"]]

    def _take(self, line: bytes) -> bool:
        """Take one line in; returns whether it was an event's."""
        name, _, value = line.decode().strip().partition(": ")
        if name == "id":
            self.last_id = value
        elif value == "[DONE]":
            self.is_done = True
        elif name == "data":
            event = json.loads(value)
            del event["created"]
            self.events.append(event)
            return True
        return False
