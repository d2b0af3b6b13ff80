"""`pdserve up` as a user runs it: a process in a terminal, with stand-ins for its children."""

import asyncio
import datetime
import json
import os
import pty
import re
import shlex
import signal
import sys
import termios
from pathlib import Path

import pytest

from pdserve.commands.cli.certs import make
from pdserve.commands.cluster.coordinator_http import trust_in
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.status import fetch_status
from tests.matrix import matrix

# Like `pdserve up FLAGS`, but its children are the program named first.
RUN_UP = """
import sys
from pdserve.commands.cli import main, up
command = sys.argv[1].split("|")
run = up.run
up.run = lambda config: run(config, command, lambda *_: None)
sys.exit(main.main(["up", *sys.argv[2:]]))
"""


class Up:
    """A running `pdserve up`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors: list[str] = []

    async def invitation(self) -> str:
        """What it prints once the cluster is ready."""
        assert self.process.stdout is not None
        lines = [(await self.process.stdout.readline()).decode() for _ in range(3)]
        return "".join(lines)

    async def says(self, pattern: str) -> re.Match[str]:
        """Wait for a line on stderr."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.errors.append(line)
            if match := re.search(pattern, line):
                return match
        pytest.fail(f"never said {pattern!r}, but: {''.join(self.errors)}")

    async def exit_code(self) -> int:
        _, err = await self.process.communicate()
        self.errors.append(err.decode())
        return self.process.returncode or 0


@pytest.fixture
async def start_up(fake_command):
    started = []

    async def start(*flags: str, stderr: int = asyncio.subprocess.PIPE) -> Up:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RUN_UP,
            "|".join(fake_command),
            *("--port=0", "--set=start_s=30", "--set=timeouts.drain_s=5", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
        started.append(process)
        return Up(process)

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def pid_of(up: Up, name: str, *, or_none: bool = False) -> int | None:
    """Ask /proc: the child of `up` whose node id, or kind, is `name`."""
    me = up.process.pid
    for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if f"--node-id={name}" in words or name in words:
            return int(child)
    if not or_none:
        pytest.fail(f"no child {name}")
    return None


@pytest.mark.long  # one that lost a process stops so by default
async def test_ctrl_c_stops_a_ready_cluster_with_exit_code_0(start_up):
    up = await start_up("--decode=2")
    text = await up.invitation()
    command = shlex.split(text.splitlines()[-1])
    assert command[:2] == ["curl", "-N"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1/chat/completions", command[2])
    body = json.loads(command[command.index("-d") + 1])
    assert body["model"] == "fake-model"
    assert body["messages"][0]["role"] == "user"
    up.process.send_signal(signal.SIGINT)
    assert await up.exit_code() == 0
    assert "stopping, for 5 s at most" in up.errors[-1]


@pytest.mark.long  # in one process it is spoken by default
async def test_https_is_spoken_and_told(start_up, tmp_path):
    pytest.importorskip("cryptography", reason="the certs extra is not installed")
    keys = make(tmp_path, "coordinator", ["127.0.0.1"], datetime.timedelta(days=1))
    up = await start_up(f"--set=access.https_dir={keys}")
    url = re.search(r"https://127\.0\.0\.1:\d+", await up.invitation())[0]
    assert (await fetch_status(url, trust=trust_in(keys / "ca.crt"))).ready
    up.process.send_signal(signal.SIGTERM)
    assert await up.exit_code() == 0


@pytest.mark.parametrize("name", matrix(["decode-0", COORDINATOR], 1))
async def test_a_lost_process_is_started_again(start_up, name):
    up = await start_up()
    url = re.search(r"http://[\d.:]+", await up.invitation())[0]
    former = pid_of(up, name)
    os.kill(former, signal.SIGKILL)
    await up.says(rf"{name} \(pid {former}\) ended with signal SIGKILL; starting it again in 0.2 s")
    await up.says(f"{name} is ready again")
    assert pid_of(up, name) != former
    if name != COORDINATOR:  # else the nodes still dial the new one
        assert not (await fetch_status(url)).waiting_for(["prefill-0", "decode-0"])
    up.process.send_signal(signal.SIGTERM)
    assert await up.exit_code() == 0


@pytest.mark.long  # test_patient_log.py has it by default
async def test_a_held_terminal_keeps_nobody_from_starting_again(start_up):
    reader, terminal = pty.openpty()
    up = await start_up(stderr=terminal)
    await up.invitation()
    termios.tcflow(terminal, termios.TCOOFF)  # as Ctrl-S
    former = pid_of(up, "decode-0")
    os.kill(former, signal.SIGKILL)
    async with asyncio.timeout(60):
        while pid_of(up, "decode-0", or_none=True) in (former, None):
            await asyncio.sleep(0.01)
    termios.tcflow(terminal, termios.TCOON)
    up.process.send_signal(signal.SIGTERM)
    assert await up.process.wait() == 0
    os.close(terminal)
    text = b""
    while piece := read_or_end(reader):
        text += piece
    os.close(reader)
    assert f"decode-0 (pid {former}) ended with signal SIGKILL" in text.decode()


def read_or_end(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has its other end
        return b""


@pytest.mark.long
async def test_each_start_is_later_than_the_one_before(start_up):
    up = await start_up("--mode=colocated")
    await up.invitation()
    for pause_s in ("0.2", "0.4"):
        os.kill(pid_of(up, "decode-0"), signal.SIGTERM)
        said = r"decode-0 \(pid \d+\) ended with exit code 0 \(as it was asked to\); "
        await up.says(f"{said}starting it again in {pause_s} s")
        await up.says("decode-0 is ready again")
    os.kill(pid_of(up, "coordinator"), signal.SIGKILL)
    await up.says("coordinator .* ended with signal SIGKILL; starting it again in 0.2 s")


@pytest.mark.long
async def test_what_ends_while_the_cluster_is_stopped_is_not_started_again(start_up):
    """Nor what was to be started in a moment."""
    up = await start_up("--model=deaf")
    await up.invitation()
    os.kill(pid_of(up, "decode-0"), signal.SIGKILL)
    await up.says("decode-0 .* starting it again")
    up.process.send_signal(signal.SIGINT)
    await up.says("stopping")
    os.kill(pid_of(up, "prefill-0"), signal.SIGKILL)
    assert await up.exit_code() == 1
    assert "prefill-0" in up.errors[-1]
    assert "starting it again" not in up.errors[-1]


@pytest.mark.long
async def test_one_that_is_stopped_before_it_hears_of_signals_has_not_failed(start_up):
    """It may have been started again a moment ago."""
    up = await start_up("--model=unprepared")
    await up.invitation()
    up.process.send_signal(signal.SIGTERM)
    assert await up.exit_code() == 0
    assert "ended with" not in up.errors[-1]


@pytest.mark.long  # it is refused beforehand by default
async def test_a_bad_model_is_told_in_one_line_with_the_childs_exit_code(start_up):
    up = await start_up("--model=bad")
    assert await up.exit_code() == 2
    assert re.fullmatch(
        r"pdserve up: error: (prefill|decode)-0 ended with exit code 2 before the cluster was "
        r"ready: no checkpoint at bad",
        up.errors[-1].splitlines()[-1],
    )
    assert "".join(up.errors).count("no checkpoint at bad") == 1


@pytest.mark.long  # a second Ctrl-C does by default
async def test_ctrl_c_while_loading_kills_at_once(start_up):
    up = await start_up("--model=stuck")
    await up.says("the fake coordinator listens")
    up.process.send_signal(signal.SIGINT)
    assert await up.exit_code() == 130


@pytest.mark.long  # test_signals.py has it by default
async def test_a_second_ctrl_c_kills_at_once(start_up):
    up = await start_up("--model=deaf", "--mode=colocated", "--set=timeouts.drain_s=60")
    await up.invitation()
    up.process.send_signal(signal.SIGINT)
    await up.says("what?")
    up.process.send_signal(signal.SIGINT)
    assert await up.exit_code() == 130


@pytest.mark.long  # any child ends with its parent: test_parent_death.py
async def test_children_do_not_survive_a_killed_parent(start_up):
    up = await start_up("--mode=colocated")
    await up.invitation()
    pidfds = [os.pidfd_open(pid_of(up, name)) for name in ("coordinator", "decode-0")]
    up.process.kill()
    for pidfd in pidfds:
        await readable(pidfd)  # a pidfd is readable when its process has ended
        os.close(pidfd)


async def readable(fd: int) -> None:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, event.set)
    try:
        await asyncio.wait_for(event.wait(), 30)
    finally:
        loop.remove_reader(fd)
