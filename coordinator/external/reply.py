"""One try to have an answer of a server elsewhere, until it has begun, and then to its end."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final

import aiohttp
import msgspec

from coordinator.external.breaker import BreakerAttempt
from coordinator.external.errors import EndpointFailed
from coordinator.external.events import (
    AnswerCheck,
    Counts,
    Malformed,
    OtherModel,
    decoded,
    events_of,
    message_in,
)
from pdserve.shared.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PdserveError,
)

_MOST_ERROR_BYTES: Final = 2**14
_MOST_BYTES: Final = 2**26  # of a whole answer
_AGAIN: Final = frozenset({408, 409, 425, 500, 502, 503, 504})
_OF_CALLER: Final = frozenset({400, 413, 415, 422})  # what it was sent is at fault
_TOO_MANY: Final = HTTPStatus.TOO_MANY_REQUESTS


class TryAgain(Exception):
    """It has failed in a way that may pass: with `error`, unless another try works."""

    def __init__(self, error: PdserveError, after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.after_s = after_s  # 0: it did not say


class Reply:
    """What comes back. Use it as a context manager: leaving it closes what is left of it."""

    def __init__(
        self,
        name: str,
        attempt: BreakerAttempt,
        response: Awaitable[aiohttp.ClientResponse],
        check: AnswerCheck,
    ) -> None:
        """
        Args:
            name: the server's, for errors.
            response: its request is sent when it is awaited.
            check: looks at all that is said.
        """
        self._name = name
        self._attempt = attempt
        self._coming = response
        self._check = check
        self._response: aiohttp.ClientResponse | None = None
        self._events: AsyncIterator[dict[str, Any] | None] | None = None
        self._first: list[dict[str, Any]] = []

    @property
    def counts(self) -> Counts | None:
        """The tokens of its answer, once it has said them."""
        return self._check.counts

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attempt.left()  # unless it is known how it went
        if self._response is not None:
            self._response.close()

    async def begin(self, *, is_streaming: bool) -> None:
        """Wait for a whole answer, or for the first event. Raises TryAgain, or as `events`."""
        try:
            self._response = response = await self._coming
            if response.status != HTTPStatus.OK:
                raise await self._refusal(response)
            if not is_streaming:
                self._take(await self._whole(response))
                self._check.end()
                return
            if response.content_type != "text/event-stream":
                raise Malformed(f"it sent {response.content_type}, but was asked for a stream")
            self._events = events_of(response.content)
            async for event in self._events:
                if event is not None:
                    self._take(event)
                    self._attempt.began()
                    return
            raise Malformed("its stream has no events")
        except Exception as error:
            raise self._sorted(error) from error

    async def events(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield what is said: one answer, or events (None: a sign of life).

        Raises EndpointFailed, or DeadlineExceeded.
        """
        try:
            for first in self._first:
                yield first
            if self._events is not None:
                async for event in self._events:
                    if event is not None:
                        self._check.look(event)
                    yield event
                self._check.end()
        except (EndpointFailed, aiohttp.ClientError) as error:
            found = self._sorted(error)
            raise (found.error if isinstance(found, TryAgain) else found) from error
        self._attempt.worked()

    def _take(self, said: dict[str, Any]) -> None:
        self._check.look(said)
        self._first.append(said)

    def _failed(self, error: EndpointFailed) -> EndpointFailed:
        """Note that what it said is wrong; return the error with its name."""
        self._attempt.failed()
        return EndpointFailed(f"{self._name!r}: {error}")

    def _sorted(self, error: Exception) -> Exception:
        """Return what to raise instead of an error, and note whether the server is at fault."""
        match error:
            case TryAgain() | _Refused():
                return error
            case OtherModel():
                return self._failed(error)
            case EndpointFailed():
                return TryAgain(self._failed(error))
            case aiohttp.SocketTimeoutError():
                self._attempt.failed()
                return DeadlineExceeded(f"{self._name!r} has said nothing for too long (timeout_s)")
            case aiohttp.ClientError():
                what = f"the connection failed ({type(error).__name__})"
                return TryAgain(self._failed(EndpointFailed(what)))
        return error

    async def _whole(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        text = bytearray()
        async for part in response.content.iter_any():
            text += part
            if len(text) > _MOST_BYTES:
                raise Malformed(f"it sent an answer of more than {_MOST_BYTES} bytes")
        return decoded(bytes(text))

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        """Return the error that a status other than 200 is."""
        status = response.status
        said = f"status {status}: {await _message(response)}"
        if status == _TOO_MANY:
            self._attempt.worked()  # it is well
            after_s = _retry_after_s(response)
            return TryAgain(Overloaded(f"{self._name!r}: {said}", after_s), after_s)
        if status in _AGAIN:
            return TryAgain(self._failed(EndpointFailed(said)), _retry_after_s(response))
        self._attempt.worked()
        if status in _OF_CALLER:
            return InvalidRequest(f"{self._name!r} refuses this call: {said}")
        return _Refused(f"{self._name!r}: {said}")


class _Refused(EndpointFailed):
    """It will not answer however often it is asked: a key, an address or a model is wrong."""


async def _message(response: aiohttp.ClientResponse) -> str:
    text = await response.content.read(_MOST_ERROR_BYTES)
    try:
        return message_in(msgspec.json.decode(text, type=dict[str, Any]))
    except msgspec.DecodeError:
        return text[:200].decode("utf-8", "replace") or "nothing more"


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Return its Retry-After in seconds; 0: none, or a date."""
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0
