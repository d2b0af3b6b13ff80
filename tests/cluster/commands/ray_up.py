"""`pdserve up` beside a Ray cluster of three machines, all of them here."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from time import monotonic
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from pdserve.commands.cluster.child import Child, Exit
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.settings.flags import as_flags
from tests.architecture.repository import ROOT
from tests.cluster.fleet import poll

if find_spec("ray") is None:
    pytest.skip("the ray extra is not installed", allow_module_level=True)

MACHINES = 3
# Ray takes what it calls a loopback cluster for one of a laptop, and else listens everywhere.
SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
SETTINGS |= {"RAY_worker_niceness": "0"}  # else actors wait for all else of a busy machine
STOP_S = 30.0
STARTED_S = 300.0  # three Rays, and processes that import torch, however busy the machine is


@dataclass
class Up:
    """A `pdserve up` that runs."""

    lines: list[str] = field(default_factory=list)
    ends: list[Exit] = field(default_factory=list)

    def start(self, *flags: str) -> Child:
        """Begin."""
        words = [*OWN_COMMAND, "up", *flags]
        return Child("up", words, lambda _, line: self.lines.append(line), self.ends.append)

    async def told(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Wait until it has written this so often; the last one."""
        found: list[re.Match[str]] = []

        async def look() -> bool:
            assert not self.ends, "\n".join(self.lines)
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            return len(found) >= times

        await poll(look, STARTED_S, lambda: f"no {pattern}: " + "\n".join(self.lines[-30:]))
        return found[-1]


@asynccontextmanager
async def serving(config: ClusterConfig) -> AsyncIterator[tuple[Up, Child, str]]:
    """One that serves, with its process and where it does; at the end it must end well."""
    up = Up()
    child = up.start(*as_flags(replace(config, start_s=STARTED_S)))
    try:
        yield up, child, (await up.told(r"is served at (http\S+) ")).group(1)
        assert (await child.stop(STOP_S)).returncode == 0, "\n".join(up.lines)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.ended()


@dataclass
class Machines:
    """Of Ray, the first of which is the head."""

    process: subprocess.Popen[str]
    client_port: int  # of the head, for those who are on none of them
    raylets: list[int] = field(default_factory=list)  # process id of each one's Ray

    def lose(self, raylet: int) -> None:
        """Have a machine vanish."""
        assert self.process.stdin is not None
        print(raylet, file=self.process.stdin, flush=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A Ray cluster, which who asks for Ray's of this machine is led to."""
    port = ReservedPort("127.0.0.1")
    words = [
        sys.executable,
        "-m",
        "tests.cluster.commands.ray_machines",
        str(MACHINES),
        str(port.port),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        process, (address, *raylets) = started(words)
        with process:
            try:
                patch.setenv("RAY_ADDRESS", address)
                yield Machines(process, port.port, raylets)
                assert process.poll() is None
            finally:
                port.close()
                process.communicate(timeout=STOP_S)
        assert process.returncode == 0


def started(words: Sequence[str]) -> tuple[subprocess.Popen[str], Any]:
    """Start the machines; return their process, and what it has said.

    Ray gives each of them 30 s, whatever else its host has to do: later ones get another chance.
    """
    deadline_s = monotonic() + STARTED_S
    while True:
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        if line := process.stdout.readline():
            return process, json.loads(line)
        process.communicate(timeout=STOP_S)
        assert monotonic() < deadline_s, "Ray's machines do not start"


def processes(flag: str) -> list[psutil.Process]:
    """Those below Ray's that were started with this flag."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "pdserve" in words and any(flag in word for word in words):
            found.append(process)
    return [process for process in found if is_of_ray(process)]


def machine_of(name: str) -> int:
    """The Ray process of the machine that this node is on."""
    (process,) = processes(f"--node-id={name}")
    actor = process.parent()
    assert actor is not None
    return actor.ppid()


def is_of_ray(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and "ray::" in " ".join(parent.cmdline())
