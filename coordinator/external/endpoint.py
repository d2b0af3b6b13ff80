"""Asks one server elsewhere: with its key, in time, again if that may help, and not for ever.

What fails before anything was passed on is tried again, MOST_TRIES times in all: errors of the
server and of the connection, and 429 where its Retry-After is short. Silence is not: whoever waits
has waited long enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, Final

import aiohttp

from coordinator.admission.in_flight import InFlight
from coordinator.external.breaker import Breaker
from coordinator.external.errors import EndpointFailed, EndpointUnavailable
from coordinator.external.events import MOST_EVENT_BYTES, AnswerCheck
from coordinator.external.reply import Reply, TryAgain
from pdserve.settings.external import ExternalEndpoint
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    Overloaded,
)

MOST_TRIES: Final = 3
MOST_PAUSE_S: Final = 5.0  # before another try; where the server wants more, the client is told so
MOST_AT_A_TIME: Final = 256  # calls
_PAUSE_S: Final = 0.25  # before the second try, and twice as long before the third
_CONNECT_S: Final = 5.0


class Endpoint:
    """One `[external.NAME]`."""

    def __init__(
        self,
        name: str,
        described: ExternalEndpoint,
        clock: Clock | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`pause` waits between two tries."""
        self.name: Final = name
        self.price: Final = described.price
        self._described = described
        self._answers_as = described.answers_as or f"{described.model}*"
        self._pause = pause
        self._breaker = Breaker(clock or SystemClock())
        self._session: aiohttp.ClientSession | None = None  # made in the loop that runs it
        self._asking = InFlight(MOST_AT_A_TIME)
        self._numbers = count()

    @asynccontextmanager
    async def asked(
        self,
        path: str,
        body: Mapping[str, Any],
        num_choices: int,
        deadline_s: float = 0.0,
        tenant: str = "",
    ) -> AsyncIterator[Reply]:
        """Ask, and yield the reply once it has begun.

        Args:
            path: what is asked for, below its base.
            body: as OpenAI describes it; the model is set here.
            num_choices: in the answer.
            deadline_s: for all of it, from now; 0: none.
            tenant: who asks; the more calls it has there, the more places are left for others.

        Raises, also while the reply is read:
            EndpointUnavailable: it is left alone for now.
            Overloaded: it, or this coordinator, has too much to do.
            InvalidRequest: it refuses what the caller asks.
            DeadlineExceeded: it was silent for too long, or the deadline has passed.
            EndpointFailed: anything else; says what.
        """
        if not self._asking.has_place(1, tenant):
            raise Overloaded(
                f"{len(self._asking)} of {MOST_AT_A_TIME} calls at a time are at {self.name!r}, "
                "and the other places are for others, if any",
                1.0,
            )
        call = str(next(self._numbers))
        self._asking.add([call], tenant)
        try:
            async with asyncio.timeout(deadline_s or None), AsyncExitStack() as held:
                yield await self._begun(path, body, num_choices, held)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name!r} was not done in {deadline_s:g} s") from error
        finally:
            self._asking.remove(call)

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    async def _begun(
        self, path: str, body: Mapping[str, Any], num_choices: int, held: AsyncExitStack
    ) -> Reply:
        """Return a reply that has begun, and that `held` closes. Raises as `asked`."""
        pause_s = _PAUSE_S
        for number in range(1, MOST_TRIES + 1):
            if wait_s := self._breaker.wait_s():
                raise EndpointUnavailable(
                    f"{self.name!r} has failed too often, and is left alone for now", wait_s
                )
            check = AnswerCheck(self._answers_as, num_choices)
            reply = Reply(self.name, self._breaker.begin(), self._post(path, body), check)
            async with AsyncExitStack() as tried:
                await tried.enter_async_context(reply)
                try:
                    await reply.begin(is_streaming=bool(body.get("stream")))
                except TryAgain as again:
                    wait_s = again.after_s or pause_s
                    if number == MOST_TRIES or wait_s > MOST_PAUSE_S:
                        raise again.error from again
                else:
                    held.push_async_exit(tried.pop_all())
                    return reply
            await self._pause(wait_s)
            pause_s *= 2
        raise AssertionError("the last try returns or raises")

    async def _post(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Send it, and return the response. Raises EndpointFailed: it has no key."""
        described = self._described
        try:
            key = described.key()
        except ConfigError as error:
            raise EndpointFailed(error.message) from error
        if self._session is None:
            limits = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_S, sock_read=described.timeout_s
            )
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_AT_A_TIME),
                timeout=limits,
                read_bufsize=MOST_EVENT_BYTES // 2,  # a line has at most twice as many
            )
        return await self._session.post(
            f"{described.url.rstrip('/')}{path}",
            json={**body, "model": described.model},
            headers={"Authorization": f"Bearer {key}"} if key else {},
            allow_redirects=False,
        )
