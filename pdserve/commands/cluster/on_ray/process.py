"""A process that an actor runs, as the one who asked for it sees it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from pdserve.commands.cluster.child import Exit, ExitSink, LineSink, Process
from pdserve.shared.process.exit_codes import FAILED

_KILLED_S = 10.0  # for an actor to tell the end of a process that was killed
_PLACED_S = 10.0  # after which an actor without a machine is told of


class ActorProcess(Process):
    """Started by an actor, once that has a place; if the actor is lost, the process has ended."""

    def __init__(
        self,
        name: str,
        actor: Any,  # a handle of a Runner
        command_line: Callable[[], Awaitable[Sequence[str]]],
        on_line: LineSink,
        on_exit: ExitSink,
    ) -> None:
        """`command_line` is asked once the actor is to start it; the rest is as for Child."""
        super().__init__(name)
        self._actor = actor
        self._command_line = command_line
        self._on_line = on_line
        self._on_exit = on_exit
        self._pid = 0
        self._task = asyncio.create_task(self._run())

    @property
    def pid(self) -> int:
        """As Process.pid; 0 until it has been started."""
        return self._pid

    def send_signal(self, number: signal.Signals) -> None:
        """As Process.send_signal. One that is not started yet is not started any more."""
        if not self.is_running:
            return
        if self._pid:
            self._actor.send_signal.remote(int(number))
            if number == signal.SIGKILL:  # it ends, even if nobody can say so
                asyncio.get_running_loop().call_later(_KILLED_S, self._give_up, number)
        else:
            self._give_up(number)

    async def _run(self) -> None:
        try:
            argv = await self._command_line()
            asks = asyncio.get_running_loop().call_later(_PLACED_S, self._tell_no_room)
            try:
                self._pid = await answer(self._actor.start.remote(self.name, argv))
            finally:
                asks.cancel()
            while self.is_running:
                for event in await answer(self._actor.events.remote()):
                    self._take(event)
        except RayError as error:  # its actor, or all of Ray, is gone
            told = " ".join(str(error).split())
            self._finish(Exit(self.name, self._pid, FAILED, f"Ray has lost its actor: {told}"))

    def _tell_no_room(self) -> None:
        self._on_line(self.name, "waits for a machine of Ray's that has room: none has, or not yet")

    def _give_up(self, number: int) -> None:
        if self.is_running:
            self._task.cancel()
            self._finish(Exit(self.name, self._pid, -number, ""))

    def _take(self, event: str | Exit) -> None:
        if isinstance(event, Exit):
            self._finish(event)
        else:
            self._on_line(self.name, event)

    def _finish(self, end: Exit) -> None:
        self._end.set_result(end)
        self._on_exit(end)


async def answer(reference: Any) -> Any:
    """What a remote call returns. Raises RayError, or what the call has raised."""
    return await asyncio.wrap_future(reference.future())
