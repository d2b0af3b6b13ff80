"""Streams of the openai SDK that outlive their coordinator: a transport for its httpx clients.

pdserve up
python examples/resuming.py [--async] [URL [OTHER_COORDINATOR ...]]
"""

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai

try:
    import httpx2 as httpx  # the openai SDK from 3.0 on
except ImportError:
    import httpx  # type: ignore[import-not-found,no-redef]

PAUSE_S = 0.2


class Resuming(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """For a Client or an AsyncClient: takes streams up where their connections broke."""

    def __init__(self, *coordinators: str, within_s: float = 60.0) -> None:
        """Any of these may answer; one that is gone is looked for during `within_s`."""
        self._urls = [httpx.URL(url) for url in coordinators]
        self._within_s = within_s
        self._transport, self._async = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()

    def _aimed(self, request: httpx.Request) -> Iterator[bool]:
        """Aim it at one coordinator after the other; yields whether the next one is the last."""
        end_s = time.monotonic() + self._within_s
        while True:
            host, port = self._urls[0].host, self._urls[0].port
            request.url = request.url.copy_with(host=host, port=port)
            request.headers["Host"] = request.url.netloc.decode()
            yield time.monotonic() > end_s
            self._urls.append(self._urls.pop(0))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a call under a key; events are passed on whole."""
        events = Events(self, request)
        return events.of(self.send(request))

    def send(self, request: httpx.Request) -> httpx.Response:
        """Send it to whoever answers."""
        for is_last in self._aimed(request):
            try:
                response = self._transport.handle_request(request)
                if is_last or not is_refused(response):
                    break
                response.close()
            except httpx.TransportError:
                if is_last:
                    raise
            time.sleep(PAUSE_S)
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As `handle_request`."""
        events = Events(self, request)
        return events.of(await self.async_send(request))

    async def async_send(self, request: httpx.Request) -> httpx.Response:
        """As `send`."""
        for is_last in self._aimed(request):
            try:
                response = await self._async.handle_async_request(request)
                if is_last or not is_refused(response):
                    break
                await response.aclose()
            except httpx.TransportError:
                if is_last:
                    raise
            await asyncio.sleep(PAUSE_S)
        return response


def is_refused(response: httpx.Response) -> bool:
    """Whether its nodes have not found their way to that coordinator yet."""
    return response.status_code in (409, 502, 503)


class Events(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Whole events: of a torn one, nothing is passed on, and it comes again."""

    def __init__(self, sender: Resuming, request: httpx.Request) -> None:
        self._sender, self._request, self._rest = sender, request, b""
        request.headers.setdefault("Idempotency-Key", uuid.uuid4().hex)
        self._stream: Any = None

    def of(self, response: httpx.Response) -> httpx.Response:
        """Return a response that has these events, if it has some."""
        if "text/event-stream" in response.headers.get("content-type", ""):
            self._stream, response.stream = response.stream, self
        return response

    def _whole(self, piece: bytes) -> Iterator[bytes]:
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"id: "):
                    self._request.headers["Last-Event-ID"] = line[4:].decode()
            yield event + b"\n\n"

    def _again(self) -> httpx.Request:
        self._request.headers.setdefault("Last-Event-ID", "0")
        self._rest = b""
        return self._request

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                for piece in self._stream:
                    yield from self._whole(piece)
                return
            except httpx.TransportError:
                response = self._sender.send(self._again())
                if response.status_code != 200:
                    raise
                self._stream = response.stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async for piece in self._stream:
                    for event in self._whole(piece):
                        yield event
                return
            except httpx.TransportError:
                response = await self._sender.async_send(self._again())
                if response.status_code != 200:
                    raise
                self._stream = response.stream

    def close(self) -> None:
        """Give the connection back."""
        self._stream.close()

    async def aclose(self) -> None:
        """Give the connection back."""
        await self._stream.aclose()


PROMPT = "Once upon a time, there was a little fox named Ruby."
ASKED: Any = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": True}
ASKED |= {"extra_body": {"ignore_eos": True}}


def tell(urls: list[str]) -> None:
    """Print a story as it comes."""
    http = httpx.Client(transport=Resuming(*urls), timeout=60.0)
    client = openai.OpenAI(base_url=f"{urls[0]}/v1", api_key="unused", http_client=http)
    model = client.models.list().data[0].id
    for chunk in client.completions.create(model=model, **ASKED):
        print(chunk.choices[0].text, end="", flush=True)


async def tell_async(urls: list[str]) -> None:
    """As `tell`."""
    http = httpx.AsyncClient(transport=Resuming(*urls), timeout=60.0)
    client = openai.AsyncOpenAI(base_url=f"{urls[0]}/v1", api_key="unused", http_client=http)
    model = (await client.models.list()).data[0].id
    async for chunk in await client.completions.create(model=model, **ASKED):
        print(chunk.choices[0].text, end="", flush=True)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--async"] or ["http://127.0.0.1:8000"]
    if "--async" in sys.argv:
        asyncio.run(tell_async(given))
    else:
        tell(given)
    print()
