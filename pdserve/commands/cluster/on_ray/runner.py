"""The actor that starts a process of the cluster on its machine, and watches it.

The process lives no longer than the actor. What Ray starts again is the actor, wherever there is
room for it; whoever talks to it then has the process started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from pdserve.commands.cluster.child import Child, Exit
from pdserve.commands.cluster.ports import ReservedPort


@dataclass(frozen=True)
class RayPlace:
    """Where an actor has come to be."""

    machine: str  # Ray's id of it
    address: str  # at which the other machines reach it
    cores: list[int]  # that processes may use there


class RayRunner:
    """Runs one process at a time."""

    def __init__(self, token: str, keys: Mapping[str, str]) -> None:
        """`token` is what processes show to join; `keys` the secrets of their environment."""
        self._token = token
        self._keys = keys
        self._child: Child | None = None
        self._reserved: list[ReservedPort] = []
        self._events: asyncio.Queue[str | Exit] = asyncio.Queue()

    @ray.method(max_task_retries=-1)
    async def place(self) -> RayPlace:
        """Where it is; to be asked again once Ray has started it again."""
        machine = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        return RayPlace(machine, address, sorted(os.sched_getaffinity(0)))

    async def reserve(self, addresses: Sequence[tuple[str, int]]) -> list[int]:
        """Reserve ports of this machine, 0 for any free one, as long as the actor lives.

        Raises:
            ConfigError: one is in use.
        """
        self._reserved = [ReservedPort(host, port) for host, port in addresses]
        return [reserved.port for reserved in self._reserved]

    @ray.method(max_task_retries=-1)
    async def start(self, name: str, argv: Sequence[str]) -> int:
        """Start a command line, with this machine's Python; its process id.

        A process whose end nobody heard of, as the connection was away, is ended first.
        """
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            await self._child.ended()
            self._events = asyncio.Queue()
        events = self._events
        with _secret(self._token) as descriptor:
            own = [
                f"--set=security.join_token_file=/proc/self/fd/{descriptor}",
                f"--die-with-parent={os.getpid()}",
            ]
            self._child = Child(
                name,
                [sys.executable, *argv[1:], *own],
                lambda _, line: events.put_nowait(line),
                events.put_nowait,
                (descriptor,),
                keys=self._keys,
            )
        return self._child.pid

    async def events(self) -> list[str | Exit]:
        """Wait for the next lines that the process writes; the last event is its end."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._child is not None:
            self._child.send_signal(signal.Signals(number))


@contextmanager
def _secret(text: str) -> Iterator[int]:
    """A descriptor of a file with this text, which is on no disk."""
    descriptor = os.memfd_create("secret")
    try:
        os.write(descriptor, text.encode())
        yield descriptor
    finally:
        os.close(descriptor)
