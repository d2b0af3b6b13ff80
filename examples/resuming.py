"""Streams of the openai SDK that outlive their coordinator: a transport for its httpx client.

pdserve up
python examples/resuming.py [URL [OTHER_COORDINATOR ...]]
"""

import sys
import time
import uuid
from collections.abc import Iterator

import openai

try:
    import httpx2 as httpx  # the openai SDK from 3.0 on
except ImportError:
    import httpx  # type: ignore[import-not-found,no-redef]


class Resuming(httpx.BaseTransport):
    """Sends each call under a key, and takes its stream up where the connection broke."""

    def __init__(self, *coordinators: str, within_s: float = 60.0) -> None:
        """Any of these may answer; one that is gone is looked for during `within_s`."""
        self._urls = [httpx.URL(url) for url in coordinators]
        self._within_s = within_s
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send it; a stream of events is passed on as events."""
        request.headers.setdefault("Idempotency-Key", uuid.uuid4().hex)
        response = self._send(request)
        if "text/event-stream" in response.headers.get("content-type", ""):
            response.stream = Events(self, request, response)
        return response

    def _send(self, request: httpx.Request) -> httpx.Response:
        end_s = time.monotonic() + self._within_s
        while True:
            host, port = self._urls[0].host, self._urls[0].port
            request.url = request.url.copy_with(host=host, port=port)
            request.headers["Host"] = request.url.netloc.decode()
            try:
                response = self._transport.handle_request(request)
                if response.status_code not in (409, 502, 503) or time.monotonic() > end_s:
                    return response
                response.close()  # its nodes have not found their way to it yet
            except httpx.TransportError:
                if time.monotonic() > end_s:
                    raise
            self._urls.append(self._urls.pop(0))
            time.sleep(0.2)


class Events(httpx.SyncByteStream):
    """Whole events: of a torn one, nothing is passed on, and it comes again."""

    def __init__(self, sender: Resuming, request: httpx.Request, response: httpx.Response) -> None:
        self._sender, self._request = sender, request
        self._response, self._stream = response, response.stream

    def __iter__(self) -> Iterator[bytes]:
        last_id = "0"
        while True:
            rest = b""
            try:
                for piece in self._stream:
                    *events, rest = (rest + piece).split(b"\n\n")
                    for event in events:
                        ids = [line[4:] for line in event.split(b"\n") if line[:4] == b"id: "]
                        last_id = ids[-1].decode() if ids else last_id
                        yield event + b"\n\n"
                return
            except httpx.TransportError:
                self._request.headers["Last-Event-ID"] = last_id
                response = self._sender._send(self._request)
                if response.status_code != 200:
                    raise
                self._stream = response.stream

    def close(self) -> None:
        """Give the connection back."""
        self._stream.close()


if __name__ == "__main__":
    urls = sys.argv[1:] or ["http://127.0.0.1:8000"]
    http = httpx.Client(transport=Resuming(*urls), timeout=60.0)
    client = openai.OpenAI(base_url=f"{urls[0]}/v1", api_key="unused", http_client=http)
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="Once upon a time, there was a little fox named Ruby.",
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()
