"""What is sent on one connection, and not read yet: bounded, and made as it is read.

Every body goes through here in pieces. A piece waits until most of the one before is read, and for
space in the memory that all unread bytes share, as bodies of requests share theirs
(`read/body_budget.py`): a payer has half of it at most, and for lack of space the slowest reader of
who holds most is ended. Only what is as short as an event of a stream waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from coordinator.api.read.body_budget import BodyBudget
from pdserve.shared.errors import BuffersFull

PIECE_BYTES: Final = 2**15
SHORT_BYTES: Final = 2**11  # unread bytes of a connection that count for nothing
FULL: Final = "answers that are not read fill the memory for them; try again later"
Write = Callable[[bytes | memoryview], Awaitable[None]]
_STOPPED: Final = "the client stopped reading"


class HttpOutbox:
    """The way out of one connection."""

    def __init__(
        self,
        transport: asyncio.Transport,
        budget: BodyBudget,
        payer: str,
        stall_timeout_s: float,
    ) -> None:
        self.transport = transport
        self._budget = budget
        self._stall_timeout_s = stall_timeout_s
        self._num_made = 0  # bytes of a body that are still to be written
        self._use(payer)

    def _use(self, payer: str) -> None:
        self._held = self._budget.body(payer)
        self._held.measured_by(lambda: self.num_unread)
        self._held.may_end(self.transport.abort)

    def identify(self, payer: str) -> None:
        """Note who pays for what is sent from now on."""
        if payer != self._held.payer:
            self._held.release()
            self._use(payer)

    @property
    def num_unread(self) -> int:
        """Bytes that are made and not read."""
        return self._num_made + self.transport.get_write_buffer_size()

    def is_short(self, num_bytes: int) -> bool:
        """Whether so many bytes more may be written as they are."""
        transport = self.transport
        return (
            not transport.is_closing()
            and transport.get_write_buffer_size() + num_bytes < SHORT_BYTES
        )

    def write(self, made: bytes) -> None:
        """Write what is short, as it is."""
        self.transport.write(made)

    async def reserve(self, num_bytes: int) -> None:
        """Wait for space for a body that is to be made. Raises BuffersFull."""
        more = num_bytes - self._num_made
        if more > 0:
            await self._held.take_most(more)
            self._num_made += more

    async def reserve_next(self, num_bytes: int) -> None:
        """Wait for space for more of a body that has begun. Raises what `send` raises."""
        try:
            await self.reserve(num_bytes)
        except BuffersFull as error:
            self.transport.abort()
            raise ConnectionResetError(_STOPPED) from error

    async def send(self, write: Write, made: bytes) -> None:
        """Write bytes piece by piece, as they are read.

        Raises ConnectionResetError when the client stops reading, or there is no space for it.
        """
        view = memoryview(made)
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            await self.send_one(partial(write, piece), len(piece))

    async def send_one(self, write: Callable[[], Awaitable[None]], num_bytes: int) -> None:
        """Have a piece written. Raises what `send` raises."""
        reserved = min(num_bytes, self._num_made)
        self._num_made -= reserved
        try:
            await self._held.take_most(num_bytes - reserved)
        except BuffersFull as error:
            self.transport.abort()
            raise ConnectionResetError(_STOPPED) from error
        await self.in_time(write())
        self._held.recount()

    async def in_time(self, writing: Awaitable[None]) -> None:
        """Write, unless the client stops reading: then ConnectionResetError is raised."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await writing
        except TimeoutError as error:
            self.transport.abort()
            raise ConnectionResetError(_STOPPED) from error

    def drained(self) -> None:
        """Note that most has been read."""
        self._held.recount()

    def end_of_answer(self) -> None:
        """Note that nothing more of an answer is to come."""
        self._num_made = 0
        self._held.recount()

    def close(self) -> None:
        """Give back everything: the connection is lost."""
        self._num_made = 0
        self._held.release()

    async def fit(self, response: web.Response) -> None:
        """Have a whole body sent in pieces, once there is space for it. Raises BuffersFull."""
        body = response.body
        if isinstance(body, bytes) and len(body) > SHORT_BYTES:
            await self.reserve(len(body))
            response.body = _InPieces(body, self)


class _InPieces(Payload):
    """A body that is written piece by piece."""

    def __init__(self, body: bytes, outbox: HttpOutbox) -> None:
        super().__init__(body)
        self._size = len(body)
        self._body = body
        self._outbox = outbox

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the whole text."""
        return self._body.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send it in pieces, as the client reads."""
        await self._outbox.send(writer.write, self._body)
