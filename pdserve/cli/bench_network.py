"""The networks that two processes of a benchmark can be in: this machine's, or one of their own.

A network namespace here has no name and belongs to nobody but the process that was started in it:
it is gone, with its end of the cable, when the process is. So there is nothing to clean up, however
the benchmark ends.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from pdserve.cli.bench_config import NetworkName
from pdserve.errors import ClusterError

_COMMAND_S = 10.0
_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
_CABLE = "pdserve0"  # either end, as each namespace calls it
_EXPORTER = "192.0.2.1"  # TEST-NET-1; nobody else is in there
_PULLER = "192.0.2.2"


class Network(Protocol):
    """Where two processes can be."""

    @property
    def launcher(self) -> Sequence[str]:
        """What a process is started by, before its own command line."""
        ...

    async def obstacle(self) -> str | None:
        """Why this machine, or this user, cannot have it; None: it works."""
        ...

    async def join(self, exporter_pid: int, puller_pid: int) -> str:
        """Connect two processes that were started by the launcher; the exporter's address.

        Raises:
            ClusterError: it did not work.
        """
        ...


class Loopback:
    """Both processes in this one's namespace."""

    launcher: Sequence[str] = ()

    async def obstacle(self) -> str | None:
        """None: there is always a loopback."""
        return None

    async def join(self, exporter_pid: int, puller_pid: int) -> str:
        """They are connected."""
        return "127.0.0.1"


class NetworkNamespaces:
    """Each process in a namespace of its own, and a virtual cable (veth) between the two."""

    launcher: Sequence[str] = ("unshare", "--net", "--")

    async def obstacle(self) -> str | None:
        """Tries it out, in a namespace that ends at once."""
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
    """Raises ClusterError: the command failed, with what it said, or did not end."""
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
