"""Server-sent events. The response's status line is sent with the first event.

By the ids of events, the client of a keyed stream goes on after a broken connection. An id says how
many events of each choice there were up to this one: `7`, or `7-5` with two choices, as the
choices' events may come in another order the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from aiohttp import web

from coordinator.api.server.outbox import SHORT_BYTES, HttpOutbox
from pdserve._native import Histogram, TextDecoder, TextStream
from pdserve.shared.errors import InvalidRequest


class EventIds:
    """Numbers the events of one stream, and leaves out those that the client has.

    `seen` says how many of each choice it has; a single 0, or None: none. Of a cascade the ids also
    say what came of the tiers that were asked before (`lost`). Raises InvalidRequest.
    """

    def __init__(
        self, num_choices: int, seen: Sequence[int] | None, lost: Sequence[int] | None = None
    ) -> None:
        if seen is None or list(seen) == [0]:
            seen = [0] * num_choices
        if len(seen) != num_choices:
            raise InvalidRequest(
                f"'Last-Event-ID' has {len(seen)} parts, but the ids of this stream's events have "
                f"{num_choices}: one for each choice",
                "Last-Event-ID",
            )
        self._head = "" if lost is None else f"t{'.'.join(map(str, lost))}:"
        self._seen = seen
        self._made = [0] * num_choices

    def unseen(self, choice: int, events: Sequence[bytes]) -> Iterator[bytes]:
        """Yield those of the next events of a choice that the client does not have, with ids."""
        for event in events:
            self._made[choice] += 1
            if self._made[choice] > self._seen[choice]:
                # What was left out of other choices is not made yet, but the client has it.
                counts = map(max, self._made, self._seen)
                yield f"id: {self._head}{'-'.join(map(str, counts))}\n".encode() + event


_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies should pass events on at once
}
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore and proxies count as traffic
DONE_DATA = "[DONE]"  # data of the last event of most streams
_MARK = "\0text\0"  # stands for the text of a template
DONE = f"data: {DONE_DATA}\n\n".encode()


def framed(data: bytes, name: str = "") -> bytes:
    """Return an event as sent on the wire: JSON data, and an `event:` line if it has a name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


class SseStream:
    """One stream of events to one client.

    Nothing is sent before `open`, so that a request that fails earlier can still get an error
    status. Writes wait for the client to read; if it reads nothing for too long, the connection is
    aborted and ConnectionResetError is raised.
    """

    def __init__(self, outbox: HttpOutbox, keep_alive: bytes = KEEP_ALIVE) -> None:
        # Do not store the request: it refers to its stream, and a reference cycle would leave
        # everything that the call holds to the garbage collector.
        self._outbox = outbox
        self._keep_alive = keep_alive
        self._response = web.StreamResponse(headers=_HEADERS)
        self._is_begun = False  # the status line is sent with what is written first
        self._is_chunked = False  # by HTTP/1.1

    @property
    def response(self) -> web.StreamResponse:
        """The response that the handler must return."""
        return self._response

    @property
    def is_open(self) -> bool:
        """Whether the status line has been sent, so that only events can follow."""
        return self._response.prepared

    @property
    def is_read(self) -> bool:
        """Whether the client reads, as far as is known, so that an event may be sent at once."""
        return self._is_begun and self._outbox.is_short(0)

    async def open(self, request: web.Request, headers: Mapping[str, str]) -> None:
        """Send the status line and headers; `headers` are added to those of every stream."""
        self._response.headers.update(headers)
        await self._response.prepare(request)
        self._is_chunked = "Transfer-Encoding" in self._response.headers
        self._response.headers.clear()  # they are sent, and take a kilobyte

    def send_at_once(self, events: Sequence[bytes]) -> bool:
        """Send framed events in one write if they are short; return whether they were.

        Only when the stream `is_read`.
        """
        text = b"".join(events)
        if not self._outbox.is_short(len(text)):
            return False
        self._outbox.write(_chunk(text) if self._is_chunked else text)
        return True

    def text_stream(
        self,
        template: TextTemplate,
        decoder: TextDecoder,
        gaps: Histogram,
        most_tokens: int,
        last_s: float,
    ) -> TextStream | None:
        """Return what sends text as it is in events of this template, if the client reads."""
        if not self.is_read:
            return None
        transport, around = self._outbox.transport, (template.before, template.behind)
        return TextStream(
            decoder, gaps, transport, *around, self._is_chunked, most_tokens, SHORT_BYTES, last_s
        )

    async def send(self, events: Sequence[bytes]) -> None:
        """Send framed events in one write."""
        await self._write(b"".join(events))

    async def send_last(self, events: Sequence[bytes]) -> None:
        """Send framed events, and end the response: in one write, if they are short."""
        text = b"".join(events)
        if self._outbox.is_short(len(text)):
            await self._response.write_eof(text)
        else:
            await self._write(text)
            await self.close()

    async def keep_alive(self) -> None:
        """Send what only shows that the connection is alive."""
        await self._write(self._keep_alive)

    async def close(self) -> None:
        """End the response."""
        if self._outbox.is_short(0):  # nothing waits
            await self._response.write_eof()
        else:
            await self._outbox.in_time(self._response.write_eof())

    async def _write(self, text: bytes) -> None:
        if self._outbox.is_short(len(text)):
            await self._response.write(text)
        else:
            await self._outbox.send(self._response.write, text)
        self._is_begun = True


def _chunk(text: bytes) -> bytes:
    """Return a chunk of a body in HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(text), text)


class TextTemplate:
    """An event encoded once with a placeholder; afterwards only the text is encoded."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        """`encode` returns the whole event for a text, which must occur in it exactly once."""
        self.before, self.behind = encode(_MARK).split(msgspec.json.encode(_MARK))

    def filled(self, text: str) -> bytes:
        """Return the event with `text` filled in."""
        return self.before + msgspec.json.encode(text) + self.behind
