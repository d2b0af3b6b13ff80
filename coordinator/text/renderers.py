"""The processes that render conversations, and what they need not be asked any more.

To ask a process takes less of the event loop than to render there; to fill in an outline
(`coordinator/templates/outline.py`) takes less than either.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from coordinator.templates.exchange import Beginning, Question, Rendered
from coordinator.templates.outline import Outlines
from coordinator.templates.template import ChatTemplate, TemplateInput
from coordinator.text.limited_process import LimitedProcess
from coordinator.text.threads import WAIT_S, Asker
from pdserve.shared.errors import DeadlineExceeded, InvalidRequest, Overloaded
from pdserve.shared.fair_share import Turns

_log = logging.getLogger(__name__)

RENDER_CPU_S: Final = 2.0  # usually less than a millisecond
MAX_MEMORY_BYTES: Final = 1 << 30  # of address space
_MAX_ANSWER_BYTES: Final = 128 << 20
_BEGIN_S: Final = 60.0  # to import it, on a busy machine
MOST: Final = 4  # processes of a template
SLOW_S = 0.5  # of waiting for a turn, after which another process is worth its start


class Renderers:
    """The processes for one template. Each renders one conversation at a time; tenants take turns.

    There is one, and more are begun while chats wait long: as many as there are cores for.
    """

    def __init__(
        self, template: ChatTemplate, cpu_s: float = RENDER_CPU_S, most: int | None = None
    ) -> None:
        self.outlines = Outlines()
        self._beginning = Beginning(
            template.source,
            template.tool_source,
            template.special_tokens,
            cpu_s,
            MAX_MEMORY_BYTES,
        )
        self._most = min(MOST, len(os.sched_getaffinity(0))) if most is None else most
        self._all = [_process()]
        self._idle = [*self._all]
        self._turns = Turns(len(self._all))
        self._num_waiting = 0
        self._further: asyncio.Task[None] | None = None  # begins one more

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        return [pid for process in self._all if (pid := process.pid) is not None]

    async def render(self, question: bytes, asker: Asker) -> bytes:
        """Have a question answered, in a turn of the asker's; `rendered` says what it says.

        Raises:
            InvalidRequest: it took too much time or memory, or became too long.
            DeadlineExceeded: the asker's deadline passed.
            Overloaded: there was no turn or no answer in time.
        """
        left_s = asker.until_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(left_s, WAIT_S))):
                await self._turn(asker.payer)
                rendering = asyncio.create_task(self._render(question))
                rendering.add_done_callback(self._over)
                return await asyncio.shield(rendering)  # whoever leaves costs others no new start
        except TimeoutError:
            if left_s < WAIT_S:
                raise DeadlineExceeded(
                    "the request's time-out passed before its messages were rendered"
                ) from None
            raise Overloaded("too many chats wait to be rendered; try again later") from None

    async def begin(self) -> None:
        """Start a process, before there are requests. Raises Overloaded if that is impossible."""
        async with self._turns.of(""), self._one():
            pass

    async def close(self) -> None:
        """End all processes that run."""
        if self._further is not None:
            self._further.cancel()
            await asyncio.gather(self._further, return_exceptions=True)
        for process in self._all:
            await process.end()

    def drop(self) -> None:
        """As `close`, without waiting: nobody will ask them any more."""
        if self._further is not None:
            self._further.cancel()
        for process in self._all:
            process.drop()

    # ---- parts ---------------------------------------------------------------------------------

    async def _turn(self, payer: str) -> None:
        self._num_waiting += 1
        began_s = time.monotonic()
        try:
            await self._turns.take(payer)
        finally:
            self._num_waiting -= 1
        is_slow = self._num_waiting > 0 and time.monotonic() - began_s > SLOW_S
        if is_slow and len(self._all) < self._most and self._further is None:
            self._further = asyncio.create_task(self._begin_further())

    async def _begin_further(self) -> None:
        process = _process()
        try:
            await self._start(process)
        except Overloaded as error:
            _log.warning("chats are rendered by %d processes: %s", len(self._all), error)
        else:
            self._all.append(process)
            self._idle.append(process)
            self._turns.pass_on()  # one more place
        finally:
            self._further = None

    @asynccontextmanager
    async def _one(self) -> AsyncIterator[LimitedProcess]:
        """Yield a process to whose turn it is: one that runs, if there is one."""
        process = next((one for one in self._idle if one.is_running), self._idle[0])
        self._idle.remove(process)
        try:
            if not process.is_running:
                await self._start(process)
            yield process
        finally:
            self._idle.append(process)

    async def _render(self, question: bytes) -> bytes:
        async with self._one() as process:
            answer = await process.ask(question, WAIT_S)
        if not answer:
            raise InvalidRequest(
                "the chat template takes more than "
                f"{self._beginning.cpu_s:g} s or {MAX_MEMORY_BYTES >> 20} MiB to render these "
                f"messages, or makes more than {_MAX_ANSWER_BYTES >> 20} MiB of them",
                "messages",
            )
        return answer

    async def _start(self, process: LimitedProcess) -> None:
        await process.start()
        if not await process.ask(msgspec.json.encode(self._beginning), _BEGIN_S):
            raise Overloaded("the process that renders chats ended before it was ready")

    def _over(self, rendering: asyncio.Task[bytes]) -> None:
        if not rendering.cancelled():
            rendering.exception()  # seen, if its caller has gone
        self._turns.pass_on()


def _process() -> LimitedProcess:
    return LimitedProcess("coordinator.templates.child", "renders chats", _MAX_ANSWER_BYTES)


def encoded(chat: TemplateInput, *, wants_outline: bool = False) -> bytes:
    """Return a conversation as `Renderers.render` takes it."""
    return msgspec.json.encode(Question(chat, wants_outline))


def rendered(answer: bytes) -> Rendered:
    """Return what an answer says. Raises InvalidRequest, as ChatTemplate.render."""
    said = msgspec.json.decode(answer, type=Rendered)
    if said.fault:
        raise InvalidRequest(said.fault, said.param)
    return said
