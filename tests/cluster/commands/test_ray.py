"""`pdserve up --on ray` on a Ray cluster of three machines, all of them here."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from pdserve.commands.cluster.child import Child, Exit
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.commands.cluster.status import fetch_status
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.settings.flags import as_flags
from tests.architecture.repository import ROOT
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import START_S, fleet_config, poll

if find_spec("ray") is None:
    pytest.skip("the ray extra is not installed", allow_module_level=True)

MACHINES = 3
# Ray takes what it calls a loopback cluster for one of a laptop, and else listens everywhere.
SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
STOP_S = 30.0


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

        await poll(look, START_S, lambda: f"no {pattern}: " + "\n".join(self.lines[-30:]))
        return found[-1]


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
        with subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                address, *raylets = json.loads(process.stdout.readline())
                patch.setenv("RAY_ADDRESS", address)
                yield Machines(process, port.port, raylets)
                assert process.poll() is None
            finally:
                port.close()
                process.communicate(timeout=STOP_S)
        assert process.returncode == 0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def up(machines: Machines, tiny_checkpoint: Path) -> AsyncIterator[tuple[Up, Child, str]]:
    """It runs, and where it serves; at the end it must end well, and leave nothing behind."""
    up = Up()
    flags = as_flags(fleet_config(tiny_checkpoint, on="ray"))
    child = up.start(*flags)
    try:
        url = (await up.told(r"is served at (http\S+) ")).group(1)
        yield up, child, url
        running = processes("--node-id=")
        end = await child.stop(STOP_S)
        assert end.returncode == 0, "\n".join(up.lines)
        gone, alive = psutil.wait_procs(running, timeout=STOP_S)
        assert gone
        assert not alive
        assert not processes("--grpc-host=")
    finally:
        child.send_signal(signal.SIGKILL)
        await child.ended()


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


async def test_the_answers_are_those_of_a_plain_cluster(
    up: tuple[Up, Child, str], client: Client
) -> None:
    _, _, url = up
    async with Client(url) as on_ray:
        for length in (7, 60, 130):
            prompt = make_prompt(length)
            answer = await on_ray.complete(prompt, 12)
            assert answer.tokens == (await client.complete(prompt, 12)).tokens
            assert (answer.prefill_node, answer.decode_node) == ("prefill-0", "decode-0")


async def test_nodes_are_spread_over_the_machines(up: tuple[Up, Child, str]) -> None:
    assert machine_of("prefill-0") != machine_of("decode-0")


async def test_a_port_that_is_taken_on_the_head_machine_is_told_also_from_outside(
    up: tuple[Up, Child, str], tiny_checkpoint: Path, machines: Machines
) -> None:
    taken = int(up[2].rpartition(":")[2])
    config = fleet_config(tiny_checkpoint, on=f"ray://127.0.0.1:{machines.client_port}")
    flags = as_flags(replace(config, port=taken))
    second = Up()
    end = await second.start(*flags).ended()
    assert (end.returncode, end.last_line) == (
        2,
        f"cannot listen on 127.0.0.1:{taken}: Address already in use",
    )


async def test_what_ray_has_no_room_for_is_told(
    up: tuple[Up, Child, str], tiny_checkpoint: Path
) -> None:
    config = fleet_config(tiny_checkpoint, on="ray", decode=2)
    end = await Up().start(*as_flags(replace(config, start_s=5.0))).ended()
    assert end.returncode == 1
    told = "no room for 3 nodes with 1 CPUs, .* within 5 s .*: it has 3 CPUs, .* and now 0 CPUs, "
    assert re.search(told, end.last_line), end.last_line


async def test_a_process_that_is_killed_comes_back(up: tuple[Up, Child, str]) -> None:
    (victim,) = processes("--node-id=decode-0")
    victim.kill()
    await up[0].told("decode-0 .* ended with signal SIGKILL; starting it again")
    await up[0].told("decode-0 is ready again")
    await answers(up[2])


@pytest.mark.parametrize(
    ("name", "flag"), [("prefill-0", "--node-id=prefill-0"), ("coordinator", "--grpc-host=")]
)
async def test_ray_starts_an_actor_again_that_is_killed(
    up: tuple[Up, Child, str], name: str, flag: str
) -> None:
    (process,) = processes(flag)
    actor = process.parent()
    assert actor is not None
    actor.kill()
    await up[0].told(f"{name} .* Ray has lost its actor")
    await up[0].told(f"{name} is ready again")
    assert process.wait(STOP_S) is None  # it went with its actor
    await answers(up[2])


async def test_a_node_whose_machine_is_lost_goes_to_another(
    up: tuple[Up, Child, str], machines: Machines
) -> None:
    head, *_ = machines.raylets
    name = "decode-0" if machine_of("decode-0") != head else "prefill-0"
    former = machine_of(name)
    assert former in machines.raylets
    before = len([line for line in up[0].lines if f"{name} is ready again" in line])
    machines.lose(former)
    await up[0].told(f"{name} is ready again", before + 1)
    assert machine_of(name) != former
    await answers(up[2])


async def answers(url: str) -> None:
    """It does, as soon as both nodes are there."""

    async def look() -> bool:
        return not (await fetch_status(url)).waiting_for(["prefill-0", "decode-0"])

    await poll(look, START_S, lambda: f"{url} lacks a node")
    async with Client(url) as client:
        assert len((await client.complete(make_prompt(40), 5)).tokens) == 5
