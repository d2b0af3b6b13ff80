import asyncio
import os
import signal
import sys

import pytest

from pdserve.commands.cluster.child import Child


def start(code: str, lines: list[str] | None = None, exits: list | None = None) -> Child:
    heard = lines if lines is not None else []
    return Child(
        "child",
        [sys.executable, "-c", code],
        lambda name, line: heard.append(line),
        (exits if exits is not None else []).append,
    )


async def test_lines_of_both_streams_arrive_before_the_end_is_told():
    lines, exits = [], []
    code = "import sys; print('a\\n\\nb'); sys.stderr.write('c'); sys.exit(3)"
    child = start(code, lines, exits)
    end = await child.ended()
    assert lines == ["a", "", "b", "c"]
    assert (end.returncode, end.cause, end.last_line) == (3, "exit code 3", "c")
    assert exits == [end]
    assert not child.is_running
    assert await child.ended() == end
    child.send_signal(signal.SIGTERM)  # no harm


async def test_an_error_line_counts_more_than_the_last_line():
    child = start("print('pdserve x: error: no: such thing'); print('bye')")
    assert (await child.ended()).last_line == "no: such thing"


async def test_a_signal_is_named():
    child = start("import time; print('up'); time.sleep(60)")
    child.send_signal(signal.SIGKILL)
    assert (await child.ended()).cause == "signal SIGKILL"


async def test_a_very_long_line_is_not_lost():
    lines = []
    child = start("print('x' * 300_000)", lines)
    await child.ended()
    assert "".join(lines) == "x" * 300_000


async def test_stop_kills_what_does_not_stop():
    ready = asyncio.Event()
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('ready'); time.sleep(60)"
    )
    child = Child("deaf", [sys.executable, "-c", code], lambda *_: ready.set(), lambda end: None)
    await ready.wait()
    assert (await child.stop(grace_s=0.1)).cause == "signal SIGKILL"


async def test_the_end_is_told_even_when_a_grandchild_keeps_the_pipe_open():
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(60)']); print(p.pid, flush=True)"
    )
    lines = []
    child = start(code, lines)
    end = await asyncio.wait_for(child.ended(), 20)
    os.kill(int(lines[0]), signal.SIGKILL)
    assert end.returncode == 0


async def test_a_program_that_does_not_exist():
    with pytest.raises(FileNotFoundError):
        Child("none", ["/no/such/program"], lambda *_: None, lambda end: None)


async def test_it_has_a_process_group_of_its_own_but_our_session():
    lines = []
    child = start("import os; print(os.getpgid(0) == os.getpid(), os.getsid(0))", lines)
    await child.ended()
    assert lines == [f"True {os.getsid(0)}"]
