"""The two processes of the transfer benchmark, exporter and puller, as children of this one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from pdserve.commands.bench.transfer.ends import Role
from pdserve.commands.bench.transfer.measurement import PullCase, R
from pdserve.commands.bench.transfer.network import Network
from pdserve.commands.bench.transfer.wire import EndSocket, PoolsFilled, Request
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.shared.errors import ClusterError

_EXIT_S = 3.0  # from the end of the conversation to the end of the process


class ProcessEnd:
    """Implements `pdserve.commands.bench.transfer.measurement.End` by a child process."""

    def __init__(self, child: Child, conversation: EndSocket, deadline_s: float) -> None:
        self._child = child
        self._conversation = conversation
        self.deadline_s = deadline_s  # of each answer
        self.has_huge_pages = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    async def ready(self) -> None:
        """Wait until its pools are filled. Raises as `ask`."""
        self.has_huge_pages = (await self._hear(PoolsFilled)).has_huge_pages

    async def ask(self, request: Request, reply: type[R]) -> R:
        """As End.ask."""
        return await self._hear(reply, request)

    async def _hear(self, reply: type[R], request: Request | None = None) -> R:
        name = self._child.name
        try:
            async with asyncio.timeout(self.deadline_s):
                if request is not None:
                    await self._conversation.send(request)
                return await self._conversation.receive(reply)
        except TimeoutError as error:
            raise ClusterError(f"the {name} did not answer within {self.deadline_s} s") from error
        except ClusterError as error:
            raise ClusterError(f"the {name}: {await self._account() or error}") from error

    async def _account(self) -> str | None:
        """How it has ended; None if it is still running."""
        try:
            async with asyncio.timeout(_EXIT_S):
                return (await self._child.ended()).account
        except TimeoutError:
            return None


@dataclass(frozen=True, slots=True)
class EndPair:
    """Both processes, ready and connected."""

    exporter: ProcessEnd
    puller: ProcessEnd
    host: str  # the exporter's address


@asynccontextmanager
async def start_ends(
    case: PullCase, network: Network, deadline_s: float, command: Sequence[str] = OWN_COMMAND
) -> AsyncIterator[EndPair]:
    """Both processes, which end with the context.

    Raises:
        ClusterError: one of them ended, was not ready in time, or could not be connected.
    """
    async with AsyncExitStack() as ends:
        exporter, puller = [
            await ends.enter_async_context(_start(role, case, network, deadline_s, command))
            for role in ("exporter", "puller")
        ]
        await asyncio.gather(exporter.ready(), puller.ready())
        host = await network.join(exporter.pid, puller.pid)
        yield EndPair(exporter, puller, host)


@asynccontextmanager
async def _start(
    role: Role, case: PullCase, network: Network, deadline_s: float, command: Sequence[str]
) -> AsyncIterator[ProcessEnd]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = Child(
            role,
            [
                *network.launcher,
                *command,
                *("bench", "transfer-end", role),
                f"--fd={theirs.fileno()}",
                f"--num-blocks={case.pool_blocks}",
                f"--block-bytes={case.block_bytes}",
                f"--device={case.devices[role == 'puller']}",
                f"--tensor-parallel={case.parallelism.tensor}",
                f"--pipeline-parallel={case.parallelism.pipeline}",
                *(["--commit"] if case.commit else []),
                f"--die-with-parent={os.getpid()}",
            ],
            on_line=lambda name, line: None,
            on_exit=lambda end: None,
            pass_fds=[theirs.fileno()],
        )
        try:
            theirs.close()
            conversation = await EndSocket.over(ours)
            try:
                yield ProcessEnd(child, conversation, deadline_s)
            finally:
                await conversation.close()
        finally:
            child.send_signal(signal.SIGKILL)  # it has nothing to clean up
            await child.ended()
