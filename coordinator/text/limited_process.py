"""A process of ours that works for clients within limits that the kernel enforces.

What clients or checkpoints have written may take any time and memory. A thread that takes too long
cannot be stopped, and it shares our memory; a process can be limited and killed. It answers one
line with one line, and limits itself as it starts. It is started when needed, and again after it
has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process

from pdserve.settings.access import without_keys
from pdserve.shared.errors import Overloaded


class LimitedProcess:
    """`python -m MODULE`; one caller at a time."""

    def __init__(self, module: str, purpose: str, max_line_bytes: int) -> None:
        """Nothing is started yet.

        Args:
            module: its main program.
            purpose: what it does, for error messages: "renders chat templates".
            max_line_bytes: of an answer.
        """
        self._module = module
        self._purpose = purpose
        self._max_line_bytes = max_line_bytes
        self._process: Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Its process id; None if it is not running."""
        return self._process.pid if self._process is not None and self.is_running else None

    async def start(self) -> None:
        """Start it, or start it again. Raises Overloaded if that is not possible now."""
        await self.end()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=PIPE,
                stdout=PIPE,
                limit=self._max_line_bytes,
                env=without_keys(os.environ),
            )
        except OSError as error:
            raise Overloaded(
                f"the process that {self._purpose} cannot be started: {error}"
            ) from error

    async def ask(self, line: bytes, timeout_s: float) -> bytes:
        """Return its answer; empty if a limit was hit, that of an answer, too. Then it has ended.

        Raises:
            Overloaded: there was no answer in time, so it has been ended.
        """
        process = self._process
        assert process is not None, "it was not started"
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(line + b"\n")
                answer = await process.stdout.readline()
        except TimeoutError as error:
            raise Overloaded(
                f"this machine is too busy: the process that {self._purpose} did not answer "
                f"within {timeout_s:g} s"
            ) from error
        except ValueError:  # so the reader says that a line is beyond its limit
            pass
        finally:
            if not answer:  # a late answer must not be taken for the next one
                await self.end()
        return answer

    def drop(self) -> None:
        """End it without waiting for that: nobody will ask it any more."""
        if self._process is not None and self.is_running:
            self._process.kill()

    async def end(self) -> None:
        """End it, if it has been started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
