"""Two hosts on one machine: network namespaces with a cable between them, each with a home.

They are anonymous, and live as long as the process that holds them: so nothing is left behind. Root
is not needed where users may have namespaces of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

COMMAND_S = 60.0
_LISTENS = "0A"  # in /proc/net/tcp
_CABLE = "cable"  # name of the device at both ends
_NEW = ("unshare", "--user", "--map-root-user", "--net", "--")
_HOLD = ("sh", "-c", "echo ready; exec cat")  # until its input is closed


@dataclass(frozen=True)
class Host:
    """A network of its own, and a directory for its files."""

    address: str
    home: Path
    pid: int  # of the process that holds the namespaces

    @property
    def enter(self) -> tuple[str, ...]:
        """The words before a command that is to run there."""
        return ("nsenter", "--preserve-credentials", "-U", "-n", "-t", str(self.pid), "--")

    @property
    def prepare(self) -> Callable[[], None]:
        """What a forked process calls to be there."""
        return partial(_move, self.pid, self.home)

    def open_ports(self) -> set[int]:
        """On which TCP ports somebody listens there."""
        tables = (Path(f"/proc/{self.pid}/net/{name}") for name in ("tcp", "tcp6"))
        rows = [row.split() for table in tables for row in table.read_text().splitlines()]
        return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == _LISTENS}

    async def run(self, *words: str) -> tuple[int, str]:
        """Run a program there to its end: its exit code, and all that it wrote."""
        child = await asyncio.create_subprocess_exec(
            *self.enter,
            *words,
            cwd=self.home,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                output, _ = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        assert child.returncode is not None
        return child.returncode, output.decode()


async def obstacle() -> str:
    """Why there can be no such hosts here; empty: there can."""
    for tool in ("unshare", "nsenter", "ip", "curl"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    child = await asyncio.create_subprocess_exec(
        *_NEW, "ip", "link", "add", _CABLE, "type", "veth", stderr=asyncio.subprocess.PIPE
    )
    _, told = await child.communicate()
    return f"no user and network namespaces here: {told.decode()}" if child.returncode else ""


@asynccontextmanager
async def two_hosts(root: Path, addresses: tuple[str, str]) -> AsyncIterator[tuple[Host, Host]]:
    """Hosts with these addresses, which reach each other. Their homes are below `root`."""
    async with AsyncExitStack() as stack:
        first = Host(addresses[0], root / addresses[0], await stack.enter_async_context(_held(())))
        # In the user namespace of the first one, which may then give it an end of the cable.
        second_pid = await stack.enter_async_context(_held(first.enter))
        second = Host(addresses[1], root / addresses[1], second_pid)
        commands = [(first, f"link add {_CABLE} type veth peer name {_CABLE} netns {second.pid}")]
        for host in (first, second):
            host.home.mkdir()
            commands.append((host, f"address add {host.address}/24 dev {_CABLE}"))
            commands.append((host, f"link set {_CABLE} up"))
            commands.append((host, "link set lo up"))
        for host, command in commands:
            code, told = await host.run("ip", *command.split())
            assert code == 0, f"{command}: {told}"
        yield first, second


@asynccontextmanager
async def _held(enter: tuple[str, ...]) -> AsyncIterator[int]:
    """A process that holds namespaces: new ones, or a new network where `enter` leads."""
    new = ("unshare", "--net", "--") if enter else _NEW
    child = await asyncio.create_subprocess_exec(
        *enter, *new, *_HOLD, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(COMMAND_S):
            assert await child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.stdin.close()
        await child.wait()


def _move(pid: int, home: Path) -> None:
    """Have this process, which has one thread, go on in the namespaces of another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns to {kind} of {pid}: {os.strerror(number)}")
    os.chdir(home)
