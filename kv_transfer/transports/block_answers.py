"""Answers requests for few blocks as they arrive: from the event loop's callback, in one call.

So a small pull waits for no task and no timer of the exporter. Whatever else arrives, and whatever
is wrong with a request, is left in the socket for the server to read and to answer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import msgspec

from kv_transfer.codecs.codec import RAW
from kv_transfer.memory import STALE, cpu_pool, stale_of
from kv_transfer.transports.block_read import BlockPlanner, BlockRows
from kv_transfer.transports.frames import (
    VALID,
    CodedPullRequest,
    PullVerdict,
    first_frame,
    first_verdict,
    frame_bytes,
)
from kv_transfer.transports.interface import Source
from kv_transfer.transports.sockets import send_all, wait_writable
from pdserve import _native
from pdserve.shared.errors import PeerLost, StaleIncarnation, TransferError

_MOST_BYTES: Final = 16 << 10  # of a request


class _Answer(msgspec.Struct, eq=False):
    """What is sent for one request."""

    head: bytes
    rows: BlockRows
    block_ids: list[int]
    generations: list[int]
    num_bytes: int  # of the blocks
    position: int = 0  # in all of it
    is_stale: bool = False  # blocks were reused while they were sent

    @property
    def is_over(self) -> bool:
        """Whether all of it has been sent."""
        return self.position == len(self.head) + self.num_bytes + len(VALID)


class BlockAnswers:
    """Answers on one connection, which belongs to the server."""

    def __init__(
        self,
        sock: socket.socket,
        access: bytes,
        source: Source,
        planner: BlockPlanner,
        stall_s: float,
    ) -> None:
        """Args: the connection and its access token; as for the server."""
        self._sock = sock
        self._access = access
        self._source = source
        self._pool = cpu_pool(source.pool)
        self._planner = planner
        self._stall_s = stall_s
        self._num_answered = 0
        self._rest: _Answer | None = None  # what there was no room for yet
        self._woken: asyncio.Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer has not been sent to its end."""
        return self._rest is not None

    async def until_other(self, idle_s: float) -> None:
        """Answer requests for few blocks until something else can be read.

        Raises:
            TimeoutError: nothing has arrived for `idle_s`.
            PeerLost, OSError: the puller is gone, or stalls.
        """
        loop = asyncio.get_running_loop()
        while True:
            loop.add_reader(self._sock.fileno(), self._look)
            try:
                await self._wait(idle_s)
            finally:
                loop.remove_reader(self._sock.fileno())
            if self._rest is None:
                return
            await self._finish(self._rest)
            self._rest = None

    async def _wait(self, idle_s: float) -> None:
        while True:
            before = self._num_answered
            self._woken = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(idle_s):
                    return await self._woken
            except TimeoutError:
                if self._num_answered == before:
                    raise

    def _look(self) -> None:
        """Something can be read: answer it, or wake the server."""
        woken = self._woken
        if woken is None or woken.done():
            return
        try:
            is_answered = self._answer_next()
        except Exception as error:  # noqa: BLE001 - raised where the server waits
            woken.set_exception(error)
        else:
            if not is_answered:
                woken.set_result(None)

    def _answer_next(self) -> bool:
        """Answer what has arrived; False: it is not answered, or not to its end."""
        try:
            said = self._sock.recv(_MOST_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        frame = first_frame(said, CodedPullRequest)
        answer = self._answer_to(frame[0]) if frame is not None else None
        if frame is None or answer is None:
            return False
        if not self._begin(answer):
            return False
        self._sock.recv(frame[1])  # it has been looked at only
        if not answer.is_over:
            self._rest = answer
        return answer.is_over

    def _answer_to(self, request: CodedPullRequest) -> _Answer | None:
        source, box = self._source, request.box
        if request.codec != RAW or not source.has_access(self._access):
            return None
        try:
            ticket = source.open_ticket(request.ticket)
            ticket.check_covers(box, source.layout)
        except (TransferError, StaleIncarnation):
            return None
        rows = self._planner.rows(box)
        if rows is None:
            return None
        num_bytes, part = self._planner.num_bytes(box), self._planner.blocks(box, ticket)
        return _Answer(
            first_verdict(num_bytes),
            rows,
            ticket.block_ids[part],
            ticket.generations[part],
            num_bytes,
        )

    def _begin(self, answer: _Answer) -> bool:
        """Send what there is room for; False: nothing, as blocks have been reused already."""
        self._send(answer)
        return answer.position > 0 or answer.is_stale

    def _send(self, answer: _Answer) -> None:
        rows = answer.rows
        position = _native.send_blocks(
            self._sock.fileno(),
            answer.head,
            self._pool.flat,
            rows.block_bytes,
            answer.block_ids,
            rows.rows,
            rows.last_rows,
            self._pool.generations,
            answer.generations,
            VALID,
            answer.position,
        )
        answer.is_stale = position == STALE
        answer.position = max(position, answer.position)
        if answer.is_stale or answer.is_over:
            self._num_answered += 1
            statistics = self._source.statistics
            statistics.bytes_sent += answer.num_bytes
            statistics.stale += answer.is_stale
            statistics.pulls_served += not answer.is_stale

    async def _finish(self, answer: _Answer) -> None:
        """Send the rest, whenever there is room for some of it."""
        try:
            while not answer.is_over and not answer.is_stale:
                async with asyncio.timeout(self._stall_s):
                    await wait_writable(self._sock)
                self._send(answer)
            if answer.is_stale:
                stale = stale_of(self._pool.generations, answer.block_ids, answer.generations)
                async with asyncio.timeout(self._stall_s):
                    await send_all(self._sock, frame_bytes(PullVerdict.of(stale)))
        except TimeoutError as error:
            raise PeerLost("a puller stalls in the middle of an answer") from error
