"""The networks between two processes of a benchmark: loopback, or network namespaces.

The namespaces are anonymous: each exists only as long as the process that was started in it, and
takes its end of the virtual cable with it. So nothing is left behind, however the benchmark ends.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from pdserve.commands.bench.transfer.config import NetworkName
from pdserve.shared.errors import ClusterError

_COMMAND_S = 10.0
_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
_CABLE = "pdserve0"  # name of the device at both ends
_EXPORTER = "192.0.2.1"  # in TEST-NET-1
_PULLER = "192.0.2.2"


class Network(Protocol):
    """A network that connects two processes."""

    @property
    def launcher(self) -> Sequence[str]:
        """The command that a process is started with, before its own command line."""
        ...

    async def obstacle(self) -> str | None:
        """Why it does not work on this machine or for this user; None: it works."""
        ...

    async def join(self, exporter_pid: int, puller_pid: int) -> str:
        """Connect two processes that were started with `launcher`; returns the exporter's address.

        Raises:
            ClusterError: a command failed.
        """
        ...


class Loopback:
    """Both processes in the current network namespace."""

    launcher: Sequence[str] = ()

    async def obstacle(self) -> str | None:
        """None: loopback always works."""
        return None

    async def join(self, exporter_pid: int, puller_pid: int) -> str:
        """Nothing to do; returns the loopback address."""
        return "127.0.0.1"


class NetworkNamespaces:
    """Each process in a network namespace of its own, connected by a virtual cable (veth)."""

    launcher: Sequence[str] = ("unshare", "--net", "--")

    async def obstacle(self) -> str | None:
        """Tries it, in a namespace that ends at once."""
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None:
                return f"the command {tool!r} is missing: install {package}"
        try:
            await _run(*self.launcher, "ip", "link", "add", _CABLE, "type", "veth")
        except ClusterError as error:
            return f"no network namespaces here (they take root): {error}"
        return None

    async def join(self, exporter_pid: int, puller_pid: int) -> str:
        """As Network.join."""
        other_end = ("peer", "name", _CABLE, "netns", str(puller_pid))
        await _run_in(exporter_pid, "link", "add", _CABLE, "type", "veth", *other_end)
        for pid, address in ((exporter_pid, _EXPORTER), (puller_pid, _PULLER)):
            await _run_in(pid, "address", "add", f"{address}/30", "dev", _CABLE)
            await _run_in(pid, "link", "set", _CABLE, "up")
            await _run_in(pid, "link", "set", "lo", "up")
        return _EXPORTER


NETWORKS: dict[NetworkName, Network] = {"loopback": Loopback(), "netns": NetworkNamespaces()}


async def _run_in(pid: int, *words: str) -> None:
    """Run `ip` in the network namespace of a process."""
    await _run("nsenter", f"--net=/proc/{pid}/ns/net", "--", "ip", *words)


async def _run(*argv: str) -> None:
    """Run a command. Raises ClusterError: it failed (with its output), or did not end in time."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_COMMAND_S):
            said, _ = await process.communicate()
    except TimeoutError as error:
        raise ClusterError(f"{' '.join(argv)!r} did not end within {_COMMAND_S} s") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        raise ClusterError(" ".join(said.decode(errors="replace").split()))
