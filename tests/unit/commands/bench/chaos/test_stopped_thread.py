"""One thread of a process stands still, the others go on; its end is noticed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from pdserve.commands.bench.chaos import stopped_thread
from pdserve.commands.bench.chaos.stopped_thread import find_thread, obstacle, stopped
from pdserve.shared.errors import ClusterError

# Its main thread answers each line, and has a thread named "engine" answer the others.
PROGRAM = """
import sys
from queue import SimpleQueue
from threading import Thread
from pdserve.shared.process.thread_name import name_this_thread

lines = SimpleQueue()

def engine():
    name_this_thread("engine")
    print("ready", flush=True)
    while True:
        print(lines.get(), flush=True)

Thread(target=engine, daemon=True).start()
for line in sys.stdin:
    if line.startswith("engine"):
        lines.put(line.strip())
    else:
        print(line.strip(), flush=True)
"""
WHY_NOT = obstacle()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True, bufsize=1
    ) as process:
        assert read(process) == "ready"
        yield process
        process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin)


async def test_a_thread_stands_still_and_goes_on(process: subprocess.Popen[str]) -> None:
    stopping = asyncio.create_task(stopped(find_thread(process.pid, "engine"), 0.2))
    await asyncio.sleep(0)  # it is stopped with its first turn
    write(process, "engine: first")
    write(process, "main: second")
    assert read(process) == "main: second", "the other thread was not there"
    await stopping
    assert read(process) == "engine: first"


async def test_the_end_of_its_process_is_the_end(process: subprocess.Popen[str]) -> None:
    stopping = asyncio.create_task(stopped(find_thread(process.pid, "engine"), 60.0))
    await asyncio.sleep(0)
    process.kill()
    async with asyncio.timeout(30):
        await stopping
    assert process.wait(30) < 0


async def test_a_thread_goes_on_when_whoever_stops_it_is_interrupted(
    process: subprocess.Popen[str],
) -> None:
    stopping = asyncio.create_task(stopped(find_thread(process.pid, "engine"), 60.0))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    write(process, "engine: first")
    assert read(process) == "engine: first"


async def test_a_process_may_end_before_its_thread_is_let_go(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, stopped_thread._DETACH, process.kill)
    await stopped(find_thread(process.pid, "engine"), 0.0)
    assert process.wait(30) < 0


async def test_a_thread_that_cannot_be_interrupted_is_not_kept(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        process.kill()
        raise ClusterError("it is about to end")

    before(monkeypatch, stopped_thread._INTERRUPT, fail)
    with pytest.raises(ClusterError, match="about to end"):
        await stopped(find_thread(process.pid, "engine"), 60.0)
    assert process.wait(30) < 0


def before(monkeypatch: pytest.MonkeyPatch, request: int, act: Callable[[], None]) -> None:
    """Do this first, whenever ptrace is asked for that."""
    ptrace = stopped_thread._ptrace

    def patched(asked: int, thread: int) -> None:
        if asked == request:
            act()
        ptrace(asked, thread)

    monkeypatch.setattr(stopped_thread, "_ptrace", patched)


async def test_there_is_no_thread_of_another_name(process: subprocess.Popen[str]) -> None:
    assert find_thread(process.pid, "none") is None
