"""`pdserve bench serve --against`: servers are started, measured and ended, one after the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.bench.serve.backend_process import running
from pdserve.commands.bench.serve.config import ServeBenchConfig
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import StartFailed
from tests.matrix import matrix

FAKE = f"env PYTHONPATH={Path(__file__).parents[5]} {sys.executable} -m tests.fakes.backend"
IN_TIME_S = 60.0


def command(diary: Path, *words: str) -> str:
    """A fake server that writes to `diary` when it begins and when it is told to end."""
    return f"{FAKE} --port {{port}} --diary {diary} {' '.join(words)}"


async def gone(pid: int) -> None:
    """Wait until a process has ended, through its pidfd; it is no child of ours."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, over.set)
        try:
            async with asyncio.timeout(IN_TIME_S):
                await over.wait()
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Where the tests run in the background, children would inherit that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@asynccontextmanager
async def bench(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ["--concurrency=2", "--requests=4", "--prompt-tokens=4", "--output-tokens=3"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve", "bench", "serve", "--json", *arguments, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(IN_TIME_S):
            yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()


@pytest.mark.long  # compare's are by default
async def test_each_has_its_turn_alone_and_is_gone_after_it(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    backends = [f"--against={name}={command(diary, name)}" for name in ("a", "b")]
    async with bench(*backends, "--rounds=2") as process:
        out, _ = await process.communicate()
    assert process.returncode == 0
    report = json.loads(out)
    assert [(row["server"], row["finished"]) for row in report["rows"]] == [("a", 8), ("b", 8)]
    assert [ratio["server"] for ratio in report["ratios"]] == ["b"]
    assert report["setup"]["kernels"]
    begun_and_ended = [line.split()[:2] for line in diary.read_text().splitlines()]
    assert begun_and_ended == [[what, name] for name in "abba" for what in ("begins", "ends")], (
        "in the second round the other one is first"
    )
    for line in diary.read_text().splitlines():
        await gone(int(line.split()[2]))


@pytest.mark.long
@pytest.mark.parametrize("number", matrix([signal.SIGINT, signal.SIGTERM], 1))
async def test_whoever_is_interrupted_takes_the_server_and_its_children_along(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A child of it is deaf to SIGTERM, as a worker may be that hangs."""
    diary = tmp_path / "diary"
    os.mkfifo(diary)
    async with bench(f"--against=a={command(diary, 'a', '--child')}") as process:
        # Open for both: without a reader, whoever writes would wait.
        with os.fdopen(os.open(diary, os.O_RDWR)) as lines:
            begun = [(await asyncio.to_thread(lines.readline)).split() for _ in range(2)]
            process.send_signal(number)
            await process.communicate()
    assert process.returncode == 130
    assert [words[0] for words in begun] == ["child", "begins"]
    for words in begun:
        await gone(int(words[2]))


@pytest.mark.parametrize(
    ("command", "start_s", "complaint"),
    [
        ("/no/such/server {port}", IN_TIME_S, "cannot be started: .*No such file"),
        (f"{sys.executable} -c 'print({{port}}); exit(3)'", IN_TIME_S, "exit code 3 .*: [0-9]+"),
        (f"{sys.executable} -c 'import time; time.sleep(60)' {{port}}", 0.5, "within 0.5 s"),
    ],
)
async def test_a_server_that_does_not_come_up_is_told(
    command: str, start_s: float, complaint: str
) -> None:
    with pytest.raises(StartFailed, match=complaint):
        async with running(Backend("it", command=command), {}, start_s=start_s):
            pytest.fail("it is not there")


def test_models_are_those_of_urls() -> None:
    config = ServeBenchConfig(url=["http://a"], model=["m"], against=["b=http://b"])
    assert config.backends == [
        Backend("http://a", url="http://a", model="m"),
        Backend("b", url="http://b"),
    ]
    with pytest.raises(ConfigError, match="2 models for 1 urls"):
        _ = ServeBenchConfig(url=["http://a"], model=["m", "n"], against=["b=http://b"]).backends
    assert ServeBenchConfig().urls == ["http://127.0.0.1:8000"]
    assert ServeBenchConfig(against=["b=http://b"]).urls == []
